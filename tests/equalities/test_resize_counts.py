"""What is counted for each resize is what a model stores and what torch executes."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from entasis.model.transformer import Transformer
from entasis.shape.budget import budget, decode_bytes_per_token
from entasis.shape.model_config import ModelConfig, Resize, Style
from entasis.shape.records import LayerShape, Shape

Models = st.SearchStrategy[tuple[Shape, ModelConfig]]

resizes = pytest.mark.parametrize("resize", get_args(Resize))
styles = pytest.mark.parametrize("style", get_args(Style))


def executed_flops(model: Transformer) -> int:
    tokens = torch.randint(model.config.vocab_size, (2, model.config.context))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens)
    return int(counter.get_total_flops())


def assert_counted(shape: Shape, config: ModelConfig) -> None:
    model = Transformer(shape, config)
    counted = budget(shape, config)
    assert counted.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert counted.flops_per_token * 2 * config.context == executed_flops(model)


@resizes
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_counted_parameters_and_flops_of_any_shape(data: st.DataObject, random_models: Models, resize: Resize) -> None:
    shape, config = data.draw(random_models)
    if resize == "constant":
        shape = dataclasses.replace(shape, unembed_width=None)
    assert_counted(shape, dataclasses.replace(config, resize=resize))


@resizes
@styles
@pytest.mark.parametrize("widths", [(48, 32, 16, 32, 56), (24, 56, 24), (16, 24, 40, 64), (64, 48, 16)])
def test_counted_parameters_and_flops_of_each_kind_of_shape(
    widths: tuple[int, ...], resize: Resize, style: Style
) -> None:
    layers = tuple(LayerShape(width=w, heads=4, kv_heads=2, head_dim=w // 8 * 2, mlp_hidden=3 * w) for w in widths)
    config = ModelConfig(vocab_size=97, context=16, style=style, tied=False, resize=resize)
    assert_counted(Shape(layers, embed_width=36), config)
    if resize != "constant":
        assert_counted(Shape(layers, embed_width=36, unembed_width=60), config)


def counts(resize: Resize, **changes: Any) -> tuple[Any, ModelConfig, Shape]:
    layers = tuple(LayerShape(width=w, heads=4, kv_heads=4, head_dim=8, mlp_hidden=64) for w in (48, 16, 56))
    shape, config = Shape(layers, embed_width=32), ModelConfig(vocab_size=97, context=16, resize=resize, **changes)
    return budget(shape, config), config, shape


def test_what_each_resize_adds_to_carrying() -> None:
    carry, *_ = counts("carry")
    assert carry.parameters - counts("zero")[0].parameters == 32 * 96  # layer 3: 16 of 48 written columns are zeros
    assert counts("gated")[0].parameters - carry.parameters == 32  # layer 3 takes 16 to 48 up again
    untrimmed = 16 * 96 + 8 * 96  # layers 1 and 3 read all of their coordinates
    assert counts("interpolation")[0].parameters - carry.parameters == untrimmed
    full = 32 * 48 + 48 * 16 + 16 * 56 + 56 * 32
    assert counts("projection")[0].parameters - carry.parameters == untrimmed + full
    missing = 32 * 16 + 16 * 40
    assert counts("projection-missing")[0].parameters - carry.parameters == untrimmed + missing
    assert counts("projection-missing")[0].flops_per_token - carry.flops_per_token == 2 * (untrimmed + missing)


@pytest.mark.parametrize("resize", ["zero", "projection", "projection-missing", "gated", "interpolation"])
def test_effective_counts_are_those_of_the_blocks_alone(resize: Resize) -> None:
    carry, mine = counts("carry")[0], counts(resize)[0]
    for name in ("effective_parameters", "effective_flops_per_token", "kv_cache_bytes_per_token"):
        assert getattr(mine, name) == getattr(carry, name), name


def test_a_constant_stream_counts_as_layers_that_wide_with_nothing_wasted() -> None:
    mine, config, shape = counts("constant")
    straight = Shape(tuple(dataclasses.replace(layer, width=32) for layer in shape.layers), 32)
    assert mine == budget(straight, dataclasses.replace(config, resize="carry"))
    assert mine.effective_parameters == 3 * (4 * 32 * 32 + 3 * 32 * 64) + 2 * 97 * 32


@resizes
def test_decoding_reads_what_is_stored(resize: Resize) -> None:
    counted, config, shape = counts(resize)
    weights = 2 * (counted.parameters - 97 * 32 + 32)  # of the embedding, one row
    assert counted.decode_bytes_per_token == weights + 16 * counted.kv_cache_bytes_per_token
    assert decode_bytes_per_token(shape, config, 16) == counted.decode_bytes_per_token


def test_causality_changes_no_count() -> None:
    assert counts("carry", causal=False)[0] == counts("carry")[0]
    assert_counted(counts("carry")[2], counts("carry", causal=False)[1])
