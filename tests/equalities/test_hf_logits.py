"""Uniform models equal Hugging Face's GPT-2 and Llama with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from entasis.model.transformer import Transformer
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape

VOCAB, CONTEXT, LAYERS = 97, 16, 3
EAGER: dict[str, Any] = {"attn_implementation": "eager"}


def random_model(layer: LayerShape, config: ModelConfig) -> Transformer:
    model = Transformer(Shape((layer,) * LAYERS, embed_width=layer.width), config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # biases that are not zero, norm weights that are not one
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def assert_same_logits(model: Transformer, peer: Any, weights: dict[str, Tensor]) -> None:
    missing, unexpected = peer.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied
    tokens = torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours, theirs = model(tokens), peer.eval()(tokens).logits
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "mlp_hidden"), [(4, 128), (1, 40), (8, 96)])
def test_uniform_gpt2_style_equals_gpt2(heads: int, mlp_hidden: int) -> None:
    layer = LayerShape(width=32, heads=heads, kv_heads=heads, head_dim=32 // heads, mlp_hidden=mlp_hidden)
    model = random_model(layer, ModelConfig(vocab_size=VOCAB, context=CONTEXT, style="gpt2"))
    peer = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=CONTEXT,
            n_embd=32,
            n_layer=LAYERS,
            n_head=heads,
            n_inner=mlp_hidden,
            layer_norm_epsilon=model.config.norm_epsilon,
            **EAGER,
        )
    )
    ours = model.state_dict()
    weights = {"transformer.wte.weight": ours["embed.weight"], "transformer.wpe.weight": ours["positions.weight"]}
    weights["lm_head.weight"] = ours["embed.weight"]
    names = {
        "ln_1": "attention.norm",
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.out",
        "ln_2": "mlp.norm",
        "mlp.c_fc": "mlp.input",
        "mlp.c_proj": "mlp.output",
    }
    for number in range(LAYERS):
        for theirs, mine in names.items():
            for kind in ("weight", "bias"):  # GPT-2 stores its matrices as (in, out)
                weight = ours[f"layers.{number}.{mine}.{kind}"]
                weights[f"transformer.h.{number}.{theirs}.{kind}"] = weight.T if weight.ndim == 2 else weight
    weights |= {f"transformer.ln_f.{kind}": ours[f"norm.{kind}"] for kind in ("weight", "bias")}
    assert_same_logits(model, peer, weights)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 8), (4, 2, 8), (6, 1, 4), (4, 2, 12)])
@pytest.mark.parametrize("theta", [10_000.0, 500.0])
def test_uniform_llama_style_equals_llama(heads: int, kv_heads: int, head_dim: int, theta: float) -> None:
    layer = LayerShape(width=24 if heads == 6 else 32, heads=heads, kv_heads=kv_heads, head_dim=head_dim, mlp_hidden=88)
    model = random_model(layer, ModelConfig(vocab_size=VOCAB, context=CONTEXT, style="llama", rotary_theta=theta))
    peer = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=layer.width,
            intermediate_size=layer.mlp_hidden,
            num_hidden_layers=LAYERS,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=model.config.norm_epsilon,
            tie_word_embeddings=False,
            **{**EAGER, "rope_theta": theta},
        )
    )
    ours = model.state_dict()
    weights = {
        "model.embed_tokens.weight": ours["embed.weight"],
        "model.norm.weight": ours["norm.weight"],
        "lm_head.weight": ours["head.weight"],
    }
    for number in range(LAYERS):
        mine, theirs = f"layers.{number}.", f"model.layers.{number}."
        rows = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        for name, weight in zip("qkv", ours[mine + "attention.qkv.weight"].split(rows), strict=True):
            weights[f"{theirs}self_attn.{name}_proj.weight"] = weight
        for name, weight in zip(("gate", "up"), ours[mine + "mlp.input.weight"].chunk(2), strict=True):
            weights[f"{theirs}mlp.{name}_proj.weight"] = weight
        weights[theirs + "self_attn.o_proj.weight"] = ours[mine + "attention.out.weight"]
        weights[theirs + "mlp.down_proj.weight"] = ours[mine + "mlp.output.weight"]
        weights[theirs + "input_layernorm.weight"] = ours[mine + "attention.norm.weight"]
        weights[theirs + "post_attention_layernorm.weight"] = ours[mine + "mlp.norm.weight"]
    assert_same_logits(model, peer, weights)
