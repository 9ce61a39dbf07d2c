"""Counts against an independent, naive one: a list of tensors and a list of matrix products, written out one by one."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entasis.shape.budget import Budget, budget, decode_bytes_per_token, end_wastes
from entasis.shape.families import bowtie, prism, uniform
from entasis.shape.model_config import Activation, ModelConfig, Norm, Positions, Style
from entasis.shape.records import LayerShape, Shape
from entasis.shape.stream import qkv_input_widths

# --- the naive count --------------------------------------------------------------------------------------------------


@dataclass
class Tensors:
    """What a layer holds, as sizes of tensors."""

    vectors: list[int] = field(default_factory=list)
    """Norm weights and biases."""
    matrices: list[tuple[int, int]] = field(default_factory=list)
    """(outputs, inputs), as stored; one copy of an expert."""
    full_matrices: list[tuple[int, int]] = field(default_factory=list)
    """The same before the inputs that are always zero were left out."""
    expert_matrices: list[tuple[int, int]] = field(default_factory=list)
    expert_vectors: list[int] = field(default_factory=list)
    attention_products: int = 0
    """Multiply-adds of scores and mixing, one query."""
    cache_entries: int = 0


def _norm(width: int, config: ModelConfig) -> list[int]:
    return [width, width] if config.norm == "layernorm" and config.bias else [width]


def _layer_tensors(shape: Shape, index: int, config: ModelConfig, context: int) -> Tensors:
    layer = shape.layers[index]
    written = max([shape.embed_width, *(earlier.width for earlier in shape.layers[:index])])
    inputs = layer.width if config.norm == "layernorm" else min(layer.width, written)
    value_dim = layer.head_dim if layer.value_dim is None else layer.value_dim
    seen = context if layer.window is None else min(context, layer.window)
    tensors = Tensors()
    if layer.heads > 0:
        tensors.vectors += _norm(layer.width, config)
        outputs = [layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim, layer.kv_heads * value_dim]
        tensors.matrices += [(rows, inputs) for rows in outputs]
        tensors.full_matrices += [(rows, layer.width) for rows in outputs]
        tensors.matrices.append((layer.width, layer.heads * value_dim))
        tensors.full_matrices.append((layer.width, layer.heads * value_dim))
        if config.bias:
            tensors.vectors += [*outputs, layer.width]
        for _ in range(layer.heads):
            tensors.attention_products += seen * layer.head_dim  # scores
            tensors.attention_products += seen * value_dim  # mixing
        tensors.cache_entries = layer.kv_heads * (layer.head_dim + value_dim)
    if layer.mlp_hidden > 0:
        tensors.vectors += _norm(layer.width, config)
        up = [(layer.mlp_hidden, layer.width)] * (2 if config.activation == "swiglu" else 1)
        tensors.expert_matrices = [*up, (layer.width, layer.mlp_hidden)]
        if config.bias:
            tensors.expert_vectors = [rows for rows, _ in tensors.expert_matrices]
        if layer.experts:
            router = (layer.experts, layer.width)
            tensors.matrices.append(router)
            tensors.full_matrices.append(router)
    return tensors


def _entries(matrices: list[tuple[int, int]]) -> int:
    return sum(rows * columns for rows, columns in matrices)


def naive_budget(shape: Shape, config: ModelConfig, context: int) -> Budget:
    stored = full = flops = full_flops = cache = cache_read = read = 0
    for index, layer in enumerate(shape.layers):
        tensors = _layer_tensors(shape, index, config, context)
        copies, used = (layer.experts, layer.experts_per_token) if layer.experts else (1, 1)
        expert, expert_extra = _entries(tensors.expert_matrices), sum(tensors.expert_vectors)
        stored += _entries(tensors.matrices) + copies * (expert + expert_extra) + sum(tensors.vectors)
        read += _entries(tensors.matrices) + used * (expert + expert_extra) + sum(tensors.vectors)
        full += _entries(tensors.full_matrices) + copies * expert
        flops += 2 * (_entries(tensors.matrices) + used * expert + tensors.attention_products)
        full_flops += 2 * (_entries(tensors.full_matrices) + used * expert + tensors.attention_products)
        cache += 2 * tensors.cache_entries
        cache_read += 2 * tensors.cache_entries * (context if layer.window is None else min(context, layer.window))

    head_width = shape.unembed_width or shape.embed_width
    embedding, head = config.vocab_size * shape.embed_width, config.vocab_size * head_width
    tables = embedding if config.tied else embedding + head
    positions = config.context * shape.embed_width if config.positions == "learned" else 0
    final_norm = sum(_norm(shape.layers[-1].width, config))

    first, last = shape.layers[0], shape.layers[-1]
    first_value_dim = first.head_dim if first.value_dim is None else first.value_dim
    first_waste = first.heads * first.head_dim + first.kv_heads * (first.head_dim + first_value_dim)
    first_waste *= max(0, first.width - shape.embed_width)
    last_waste = last.mlp_hidden * max(0, last.width - head_width)

    looked_up = shape.embed_width * (0 if config.tied else 1)  # a tied row is read with the head
    looked_up += shape.embed_width if config.positions == "learned" else 0
    return Budget(
        parameters=stored + final_norm + tables + positions,
        effective_parameters=full + tables - first_waste - last_waste * max(last.experts, 1),
        embedding_parameters=tables + positions,
        flops_per_token=flops + 2 * head,
        effective_flops_per_token=full_flops
        + 2 * head
        - 2 * (first_waste + last_waste * (last.experts_per_token if last.experts else 1)),
        kv_cache_bytes_per_token=cache,
        decode_bytes_per_token=2 * (read + final_norm + head + looked_up) + cache_read,
        context=context,
    )


# --- random shapes ----------------------------------------------------------------------------------------------------


@st.composite
def layers(draw: st.DrawFn) -> LayerShape:
    heads = draw(st.integers(0, 6))
    hidden = draw(st.integers(0, 200))
    experts = draw(st.just(0) | st.integers(1, 8)) if hidden else 0
    return LayerShape(
        width=draw(st.integers(1, 96)),
        heads=heads,
        kv_heads=draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])) if heads else 0,
        head_dim=draw(st.integers(1, 32)),
        mlp_hidden=hidden,
        value_dim=draw(st.none() | st.integers(1, 32)),
        window=draw(st.none() | st.integers(1, 64)),
        experts=experts,
        experts_per_token=draw(st.integers(1, experts)) if experts else 0,
    )


@st.composite
def shapes_and_configs(draw: st.DrawFn) -> tuple[Shape, ModelConfig]:
    config = ModelConfig(
        vocab_size=draw(st.integers(1, 300)),
        context=draw(st.integers(1, 64)),
        style=draw(st.sampled_from(get_args(Style))),
    )
    if draw(st.booleans()):  # parts of both sets mixed
        config = dataclasses.replace(
            config,
            norm=draw(st.sampled_from(get_args(Norm))),
            positions=draw(st.sampled_from(get_args(Positions))),
            activation=draw(st.sampled_from(get_args(Activation))),
            bias=draw(st.booleans()),
            tied=draw(st.booleans()),
        )
    unembed = None if config.tied else draw(st.none() | st.integers(1, 96))
    shape = Shape(tuple(draw(st.lists(layers(), min_size=1, max_size=6))), draw(st.integers(1, 96)), unembed)
    return shape, config


@settings(max_examples=400, deadline=None)
@given(shapes_and_configs(), st.integers(1, 200))
def test_every_field_equals_the_naive_count(pair: tuple[Shape, ModelConfig], context: int) -> None:
    shape, config = pair
    assert budget(shape, config, context) == naive_budget(shape, config, context)


@settings(max_examples=100, deadline=None)
@given(shapes_and_configs(), st.integers(1, 64), st.integers(1, 100))
def test_a_batch_shares_one_pass_over_the_weights(pair: tuple[Shape, ModelConfig], context: int, batch: int) -> None:
    shape, config = pair
    one = decode_bytes_per_token(shape, config, context)
    assert one == pytest.approx(budget(shape, config, context).decode_bytes_per_token, abs=0.51)
    many = decode_bytes_per_token(shape, config, context, batch=batch)
    cache = sum(
        2 * layer.kv_heads * (layer.head_dim + layer.value_head_dim) * min(layer.window or context, context)
        for layer in shape.layers
    )
    assert cache <= many <= one * (1 + 1e-12)
    if not any(layer.experts for layer in shape.layers):
        row = 2 * shape.embed_width * ((not config.tied) + (config.positions == "learned"))
        assert many == pytest.approx((one - cache - row) / batch + cache + row)


def test_a_large_batch_hits_every_expert() -> None:
    config = ModelConfig(97, 16)
    sparse = Shape((LayerShape(16, 2, 2, 8, 32, experts=8, experts_per_token=2),), 16)
    budget_of_sparse = budget(sparse, config)
    weights = 2 * (budget_of_sparse.parameters - 97 * 16)  # all but the embedding, of which each sequence reads a row
    batch = 10_000
    read = decode_bytes_per_token(sparse, config, 16, batch=batch) - 2 * 16 - 16 * 2 * 2 * 16
    assert read == pytest.approx(weights / batch)


# --- known models -----------------------------------------------------------------------------------------------------


def test_gpt2_124m_by_hand() -> None:
    counted = budget(uniform(layers=12, width=768, heads=12), ModelConfig(50_257, 1024, "gpt2"))
    block_matrices = 12 * 12 * 768 * 768
    vocabulary = 50_257 * 768
    assert counted.parameters == 124_439_808  # as published
    assert counted.effective_parameters == block_matrices + vocabulary == 123_532_032
    assert counted.embedding_parameters == vocabulary + 1024 * 768
    # per layer and token: scores and mixing, each 2 * 12 heads * 64 * 1024
    assert counted.flops_per_token == 2 * block_matrices + 2 * vocabulary + 12 * 2 * 2 * 768 * 1024 == 284_812_800
    assert counted.effective_flops_per_token == counted.flops_per_token
    assert counted.kv_cache_bytes_per_token == 12 * 2 * 768 * 2 == 36_864
    # all parameters but the positions, one row of those, and the cache of 1024 tokens
    read = 2 * (124_439_808 - 1024 * 768 + 768) + 1024 * 36_864
    assert counted.decode_bytes_per_token == read
    assert counted.context == 1024


def test_llama_7b_by_hand() -> None:
    shape = uniform(layers=32, width=4096, heads=32, mlp_hidden=11_008)
    counted = budget(shape, ModelConfig(32_000, 2048, "llama"), context=4096)
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11_008)
    assert counted.parameters == 6_738_415_616  # as published
    assert counted.parameters - counted.effective_parameters == 65 * 4096  # the norms
    assert counted.embedding_parameters == 2 * 32_000 * 4096
    assert counted.flops_per_token == 2 * matrices + 2 * 32_000 * 4096 + 32 * 4 * 4096 * 4096
    assert counted.kv_cache_bytes_per_token == 524_288
    assert counted.context == 4096


def test_grouped_heads_shrink_projections_and_cache_by_hand() -> None:
    config = ModelConfig(128_256, 8192, "llama")  # the sizes of Llama 3 8B
    counted = budget(uniform(layers=32, width=4096, heads=32, kv_heads=8, mlp_hidden=14_336), config)
    assert counted.parameters == 8_030_261_248  # as published
    assert counted.kv_cache_bytes_per_token == 131_072


PRISMS = {
    "123.5M": (768, [3] * 3 + [6] * 3 + [12] * 6, 123_532_032),
    "353.5M": (1024, [4] * 4 + [8] * 4 + [16] * 16, 353_453_056),
    "756.7M": (1536, [6] * 4 + [12] * 4 + [24] * 16, 756_672_000),
}


@pytest.mark.parametrize("scale", PRISMS)
def test_the_published_sizes_of_the_prism_transformer(scale: str) -> None:
    width, heads, effective = PRISMS[scale]
    config = ModelConfig(50_257, 1024, "gpt2")
    shape = prism(width=width, heads=heads)
    counted = budget(shape, config)
    assert counted.effective_parameters == effective
    assert f"{effective / 1e6:.1f}M" == scale
    straight = budget(uniform(layers=len(heads), width=width, heads=heads[-1]), config)
    assert counted == straight  # a prism costs what its straight column costs, in every field


# --- what the ><former counts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "width", "turn"), [(16, 640, 12), (24, 960, 18), (32, 1280, 24), (40, 1600, 30)])
def test_a_bowtie_stores_more_than_it_counts_by_its_wastes(layers: int, width: int, turn: int) -> None:
    """Full matrices exceed the effective count by the two published wastes; the first is not stored at all."""
    config = ModelConfig(100_263, 4096, "llama")
    shape = bowtie(layers=layers, width=width, heads=16, turn=turn)
    counted = budget(shape, config)
    first = last = shape.layers[0].width
    assert first == shape.layers[-1].width > width
    zero_inputs, cut_outputs = 3 * (first - width) * first, 4 * (last - width) * last
    norms = 2 * sum(layer.width for layer in shape.layers) + last
    full = sum(16 * layer.width**2 for layer in shape.layers) + 2 * 100_263 * width
    assert counted.effective_parameters == full - zero_inputs - cut_outputs
    assert counted.parameters == full - zero_inputs + norms
    assert counted.parameters - counted.effective_parameters == cut_outputs + norms
    wastes = end_wastes(shape)
    assert (wastes.first_qkv, wastes.last_down, wastes.last_down_active) == (zero_inputs, cut_outputs, cut_outputs)

    # FLOPs per sequence as published: 2 s h v + sum of (8 + 6 E) s w^2 + 4 s^2 w, less those of the wastes
    s, mean_width = 4096, sum(layer.width for layer in shape.layers) / layers
    sequence = 2 * s * width * 100_263 + sum(32 * s * each.width**2 + 4 * s**2 * each.width for each in shape.layers)
    assert counted.effective_flops_per_token * s == sequence - 6 * s * (first - width) * first - 2 * s * cut_outputs

    straight = budget(uniform(layers=layers, width=width, heads=16), config)
    kv_ratio = counted.ratio_to(straight)["kv_cache_bytes_per_token"]
    assert kv_ratio == pytest.approx(mean_width / width)
    assert 0.85 < mean_width / width < 0.95  # about a tenth is saved, as published
    assert counted.ratio_to(straight)["effective_parameters"] == pytest.approx(1, abs=0.01)


def test_under_layer_norm_zeros_are_read_and_stored() -> None:
    layer = LayerShape(64, 4, 4, 16, 0)
    shape = Shape((layer, LayerShape(96, 4, 4, 16, 0), LayerShape(80, 4, 4, 16, 0)), 32)
    assert qkv_input_widths(shape, ModelConfig(97, 16, "llama")) == (32, 64, 80)
    assert qkv_input_widths(shape, ModelConfig(97, 16, "gpt2")) == (64, 96, 80)


def test_ratios_are_per_field_and_none_where_the_other_is_zero() -> None:
    config = ModelConfig(97, 16)
    without = budget(Shape((LayerShape(16, 0, 0, 0, 64),), 16), config)
    counted = budget(Shape((LayerShape(16, 2, 2, 8, 64),), 16), config)
    ratio = counted.ratio_to(without)
    assert list(ratio) == list(counted.to_dict())
    assert ratio["kv_cache_bytes_per_token"] is None
    assert ratio["parameters"] == counted.parameters / without.parameters
    assert ratio["context"] == 1.0
    assert all(value is None or math.isfinite(value) for value in ratio.values())


def test_the_context_is_the_configured_one_unless_given() -> None:
    shape, config = uniform(layers=2, width=32, heads=2), ModelConfig(97, 16, "gpt2")
    assert budget(shape, config).context == 16
    longer = budget(shape, config, context=32)
    assert longer.parameters == budget(shape, config).parameters  # learned positions are those of the configuration
    assert longer.flops_per_token - budget(shape, config).flops_per_token == 2 * 2 * 2 * 32 * 16
