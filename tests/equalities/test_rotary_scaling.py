"""Rotary scaling equals Hugging Face's: frequencies for any head dim, and the logits of a Llama."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import entasis
from entasis.errors import EntasisError
from entasis.model.rotary import rotation, scaled
from entasis.model.transformer import Transformer
from entasis.run.checkpoint import Checkpoint
from entasis.run.load import restore_model
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape
from entasis.shape.rotary_scaling import RotaryScaling

VOCAB, CONTEXT, LAYERS = 97, 64, 3

SCALINGS: dict[str, tuple[RotaryScaling, dict[str, Any]]] = {
    "linear": (RotaryScaling("linear", 4.0), {"rope_type": "linear", "factor": 4.0}),
    "yarn": (
        RotaryScaling("yarn", 4.0, original_context=16),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ),
    "yarn, long": (
        RotaryScaling("yarn", 16.0, original_context=4096, beta_fast=20.0, beta_slow=2.0, temperature=1.1),
        {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "beta_fast": 20.0,
         "beta_slow": 2.0, "attention_factor": 1.1},
    ),
    "llama3": (
        RotaryScaling("llama3", 4.0, original_context=16),
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 16},
    ),
    "llama3, long": (
        RotaryScaling("llama3", 8.0, original_context=8192, low_frequency=2.0, high_frequency=5.0),
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 5.0,
         "original_max_position_embeddings": 8192},
    ),
}  # fmt: skip


def peer_config(parameters: dict[str, Any], head_dim: int, theta: float, **more: Any) -> LlamaConfig:
    return LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 88,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": head_dim,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "max_position_embeddings": CONTEXT,
            "attn_implementation": "eager",
            "rope_parameters": {**parameters, "rope_theta": theta},
            **more,
        }
    )


def plain(head_dim: int, theta: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return theta ** -(torch.arange(0, head_dim, 2, dtype=dtype) / head_dim)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("head_dim", [4, 12, 64, 128, 256])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_hugging_face(name: str, head_dim: int, theta: float) -> None:
    scaling, parameters = SCALINGS[name]
    wanted, temperature = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](peer_config(parameters, head_dim, theta), None)
    single = scaled(plain(head_dim, theta), head_dim, theta, scaling)
    double = scaled(plain(head_dim, theta, torch.float64), head_dim, theta, scaling)
    torch.testing.assert_close(single, wanted, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(double, wanted.double(), rtol=2e-6, atol=1e-9)
    assert (scaling.temperature or 1.0) == pytest.approx(temperature, rel=1e-12)
    if head_dim > 4:
        assert not torch.allclose(single, plain(head_dim, theta), rtol=1e-3, atol=0)


@pytest.mark.parametrize("head_dim", [4, 12, 64, 256])
def test_ntk_is_another_base(head_dim: int) -> None:
    """Hugging Face has the dynamic form only, which at 24 tokens of 16 has grown the base by a factor of 2."""
    frequencies = scaled(plain(head_dim, 500.0), head_dim, 500.0, RotaryScaling("ntk", 2.0))
    base = 500.0 * 2 ** (head_dim / (head_dim - 2))
    torch.testing.assert_close(frequencies, plain(head_dim, base), rtol=1e-6, atol=0)
    config = peer_config({"rope_type": "dynamic", "factor": 2.0}, head_dim, 500.0, max_position_embeddings=16)
    torch.testing.assert_close(
        frequencies, ROPE_INIT_FUNCTIONS["dynamic"](config, None, seq_len=24)[0], rtol=1e-6, atol=0
    )
    assert frequencies[0] == 1
    assert frequencies[-1] == pytest.approx(plain(head_dim, 500.0)[-1].item() / 2, rel=1e-6)
    assert torch.equal(scaled(plain(2, 500.0), 2, 500.0, RotaryScaling("ntk", 2.0)), plain(2, 500.0))


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn", "llama3"])
def test_a_factor_of_one_is_no_scaling(kind: Any) -> None:
    scaling = RotaryScaling(kind, 1.0, original_context=16 if kind in ("yarn", "llama3") else None)
    positions = torch.arange(40)[None]
    for one, other in zip(
        rotation(positions, 16, 1e4, torch.float64, scaling), rotation(positions, 16, 1e4, torch.float64), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("head_dim", [8, 12])
@pytest.mark.parametrize("name", ["linear", "ntk", "yarn", "yarn, long", "llama3"])
def test_logits_are_those_of_a_llama(name: str, head_dim: int) -> None:
    layer = LayerShape(width=32, heads=2, kv_heads=1, head_dim=head_dim, mlp_hidden=88)
    if name == "ntk":
        scaling, parameters, theta = RotaryScaling("ntk", 4.0), {"rope_type": "default"}, 100 * 4 ** (
            head_dim / (head_dim - 2))  # fmt: skip
    else:
        (scaling, parameters), theta = SCALINGS[name], 100.0
    config = ModelConfig(vocab_size=VOCAB, context=CONTEXT, rotary_theta=100.0, rotary_scaling=scaling)
    model = Transformer(Shape((layer,) * LAYERS, embed_width=32), config)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(noise, alpha=0.15)
    peer: Any = LlamaForCausalLM(peer_config(parameters, head_dim, theta))
    missing, unexpected = peer.load_state_dict(as_llama(model), strict=False)
    assert not missing and not unexpected
    tokens = torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(2))
    unscaled = Transformer(model.shape, dataclasses.replace(config, rotary_scaling=None))
    unscaled.load_state_dict(model.state_dict())
    with torch.no_grad():
        ours, theirs, without = model(tokens), peer(tokens).logits, unscaled(tokens)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
    assert (ours - without).abs().max() > 1e-2, "the scaling can be seen"


def as_llama(model: Transformer) -> dict[str, Tensor]:
    ours = model.state_dict()
    names = {
        "self_attn.o_proj": "attention.out",
        "mlp.down_proj": "mlp.output",
        "input_layernorm": "attention.norm",
        "post_attention_layernorm": "mlp.norm",
    }
    weights = {
        "model.embed_tokens.weight": ours["embed.weight"],
        "model.norm.weight": ours["norm.weight"],
        "lm_head.weight": ours["head.weight"],
    }
    for number, (layer, _) in enumerate(model.blocks()):
        mine, theirs = f"layers.{number}.", f"model.layers.{number}."
        rows = [layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim, layer.kv_heads * layer.head_dim]
        parts = ours[mine + "attention.qkv.weight"].split(rows)
        weights |= {f"{theirs}self_attn.{name}_proj.weight": w for name, w in zip("qkv", parts, strict=True)}
        halves = ours[mine + "mlp.input.weight"].chunk(2)
        weights |= {f"{theirs}mlp.{name}_proj.weight": w for name, w in zip(("gate", "up"), halves, strict=True)}
        weights |= {f"{theirs}{name}.weight": ours[f"{mine}{own}.weight"] for name, own in names.items()}
    return weights


def test_each_layer_is_scaled_for_its_own_head_dim() -> None:
    scaling, temperature = SCALINGS["yarn"][0], 0.1 * math.log(4.0) + 1
    config = ModelConfig(vocab_size=VOCAB, context=CONTEXT, rotary_scaling=scaling)
    model = Transformer(entasis.prism(width=32, heads=[1, 2, 4], config=config), config)
    positions = torch.arange(CONTEXT)[None]
    made = model._rotations(positions)
    assert list(made) == [32, 16, 8]
    for dim, found in made.items():
        angles = positions[..., None, None] * scaled(plain(dim, 1e4), dim, 1e4, scaling)
        assert torch.equal(found.cos, angles.cos() * temperature)
        assert torch.equal(found.sin, angles.sin() * temperature)


def test_angles_stay_exact_under_bfloat16() -> None:
    """Positions beyond 256 would collide if tables were made or cast in it."""
    config = ModelConfig(vocab_size=VOCAB, context=CONTEXT, rotary_scaling=SCALINGS["linear"][0])
    model = Transformer(entasis.uniform(layers=1, width=16, heads=1, config=config), config).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        by = model._rotations(torch.arange(4096)[None])[16]
    assert by.cos.dtype == torch.float32
    assert len({tuple(row) for row in torch.cat([by.cos, by.sin], dim=-1)[0, :, 0].tolist()}) == 4096


def test_weights_may_be_taken_to_a_longer_context_on_purpose_only() -> None:
    short = ModelConfig(vocab_size=VOCAB, context=16)
    shape = entasis.uniform(layers=2, width=16, heads=2, config=short)
    trained = Transformer(shape, short, seed=3)
    longer = dataclasses.replace(short, context=64, rotary_scaling=RotaryScaling("yarn", 4.0, original_context=16))
    model = Transformer(shape, longer, seed=4)
    saved = Checkpoint(
        step=1, model=trained.state_dict(), optimizer={}, state={"shape": shape.to_dict(), "block": short.to_dict()}
    )
    with pytest.raises(EntasisError, match="another block: context 16 instead of 64, rotary_scaling None instead of"):
        restore_model(model, saved)
    model.load_state_dict(trained.state_dict())
    assert model(torch.zeros(1, 64, dtype=torch.int64)).isfinite().all()
