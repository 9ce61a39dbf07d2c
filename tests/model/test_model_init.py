"""How models start: the stated distributions, and the same bits wherever tensors are alike."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch

import entasis
from entasis.model.init import initialize
from entasis.model.transformer import Transformer
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape

VOCAB = 97
STYLES: tuple[Literal["gpt2", "llama"], ...] = ("gpt2", "llama")


def config(style: Literal["gpt2", "llama"] = "llama") -> ModelConfig:
    return ModelConfig(vocab_size=VOCAB, context=64, style=style)


def varied_shape() -> Shape:
    layers = tuple(
        LayerShape(width=w, heads=4, kv_heads=2, head_dim=32, mlp_hidden=4 * w, value_dim=24) for w in (320, 128, 192)
    )
    return Shape(layers, embed_width=256)


@pytest.mark.parametrize("style", STYLES)
def test_standard_deviations(style: Literal["gpt2", "llama"]) -> None:
    model = Transformer(varied_shape(), config(style))
    expected = {"embed.weight": 0.02, "positions.weight": 0.02, "head.weight": 0.02}
    for number, width in enumerate((320, 128, 192)):
        into = 0.02 * math.sqrt(768 / width)
        for name in ("attention.qkv", "mlp.input"):
            expected[f"layers.{number}.{name}.weight"] = into
        for name in ("attention.out", "mlp.output"):
            expected[f"layers.{number}.{name}.weight"] = into / math.sqrt(6)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            assert parameter.std().item() == pytest.approx(expected[name], rel=0.03), name
            assert abs(parameter.mean().item()) < 0.05 * expected[name], name
        else:
            start = 1.0 if name.endswith("norm.weight") else 0.0
            assert torch.equal(parameter, torch.full_like(parameter, start)), name


def test_the_output_of_each_normalised_projection_has_the_same_spread_at_every_width() -> None:
    spreads = []
    for width in (64, 256, 1024):
        layer = LayerShape(width=width, heads=4, kv_heads=4, head_dim=64, mlp_hidden=512)
        model = Transformer(Shape((layer,), embed_width=width), config())
        [(_, block)] = model.blocks()
        assert block.mlp is not None
        spreads.append(block.mlp.input(block.mlp.norm(torch.randn(1, 64, width))).std().item())
    assert spreads == pytest.approx([0.02 * math.sqrt(768)] * 3, rel=0.1)


@pytest.mark.parametrize("style", STYLES)
def test_a_prism_starts_with_the_bits_of_its_uniform_reference(style: Literal["gpt2", "llama"]) -> None:
    uniform = Transformer(entasis.uniform(layers=4, width=32, heads=4, config=config(style)), config(style), seed=3)
    prism = Transformer(entasis.prism(width=32, heads=[1, 2, 4, 4], config=config(style)), config(style), seed=3)
    assert uniform.state_dict().keys() == prism.state_dict().keys()
    for name, weight in uniform.state_dict().items():
        assert torch.equal(weight, prism.state_dict()[name]), name
    tokens = torch.arange(16)[None]
    assert not torch.equal(uniform(tokens), prism(tokens))


@pytest.mark.parametrize("style", STYLES)
def test_a_prism_at_its_baseline_is_the_uniform_model(style: Literal["gpt2", "llama"]) -> None:
    uniform = Transformer(entasis.uniform(layers=4, width=32, heads=4, config=config(style)), config(style))
    prism = Transformer(entasis.prism(width=32, heads=[4] * 4, config=config(style)), config(style))
    for name, weight in uniform.state_dict().items():
        assert torch.equal(weight, prism.state_dict()[name]), name
    tokens = torch.randint(VOCAB, (2, 16))
    assert torch.equal(uniform(tokens), prism(tokens))


def test_the_seed_alone_decides() -> None:
    shape = varied_shape()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = Transformer(shape, config(), seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = Transformer(shape, config(), seed=5).state_dict()
    other = Transformer(shape, config(), seed=6).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(not torch.equal(first[name], other[name]) for name in first if first[name].ndim == 2)


def test_no_two_tensors_start_alike() -> None:
    model = Transformer(entasis.uniform(layers=3, width=32, heads=4), config())
    # Signs, since the same draws at another scale would be alike too.
    starts = [tuple((p.flatten()[:64] > 0).tolist()) for p in model.parameters() if p.ndim == 2]
    assert len(set(starts)) == len(starts)


def test_other_dtypes_start_with_the_float32_numbers() -> None:
    single = Transformer(varied_shape(), config()).state_dict()
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        double = Transformer(varied_shape(), config()).state_dict()
    finally:
        torch.set_default_dtype(default)
    assert all(double[name].dtype == torch.float64 for name in double)
    assert all(torch.equal(single[name], double[name].float()) for name in single)


def test_a_meta_model_can_be_initialized_later() -> None:
    with torch.device("meta"):
        late = Transformer(varied_shape(), config("gpt2"), seed=4)
    assert all(parameter.is_meta for parameter in late.parameters())
    late.to_empty(device="cpu")
    initialize(late, seed=4)
    early = Transformer(varied_shape(), config("gpt2"), seed=4)
    for name, weight in early.state_dict().items():
        assert torch.equal(weight, late.state_dict()[name]), name
