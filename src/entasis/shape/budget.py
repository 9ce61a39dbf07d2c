"""Exact costs of a shape, counted layer by layer: parameters, FLOPs, KV cache, bytes per decoded token."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape
from entasis.shape.stream import as_built, qkv_input_widths, resize_parameters, resize_products, resize_steps

_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Budget:
    """What a shape costs. FLOPs count a multiply and an add as two; bytes are those of bfloat16."""

    parameters: int
    """Stored, everything included: exactly the sum of `numel`."""
    effective_parameters: int
    """The papers' count: all block matrices at full width, embedding and head (once if tied); no norms, biases or
    positions, resizes; minus the two wastes of a shape that is wider at its ends than its embedding and head
    (`end_wastes`)."""
    embedding_parameters: int
    """Embedding, head (once if tied), learned positions."""
    flops_per_token: int
    """Forward, as executed: matrices, and attention over the full context (causality not halved)."""
    effective_flops_per_token: int
    """Forward, all block matrices at full width, no resizes, minus twice the two wastes."""
    kv_cache_bytes_per_token: int
    """Summed over layers: kv_heads (head_dim + value_dim) 2."""
    decode_bytes_per_token: int
    """Weights and cache read to decode one token at `context`, batch 1."""
    context: int
    """The context in tokens that the figures are for."""

    def to_dict(self) -> dict[str, int]:
        """Plain data."""
        return dataclasses.asdict(self)

    def ratio_to(self, other: Budget) -> dict[str, float | None]:
        """This budget divided by another, per field; None where the other is zero."""
        mine, theirs = self.to_dict(), other.to_dict()
        return {name: mine[name] / theirs[name] if theirs[name] else None for name in mine}


def budget(shape: Shape, config: ModelConfig, context: int | None = None) -> Budget:
    """The costs of `shape` with the blocks of `config`, at `context` tokens (default: the configured context)."""
    context = config.context if context is None else context
    shape = as_built(shape, config)
    counts = [
        _count_layer(layer, width, config, context)
        for layer, width in zip(shape.layers, qkv_input_widths(shape, config), strict=True)
    ]
    tables = _tables(shape, config)
    # Tied tables are one tensor, and only the head multiplies by it.
    vocabulary_parameters = tables.head if config.tied else tables.embedding + tables.head
    wastes = end_wastes(shape)
    block_flops = [2 * count.active_matrices + count.attention_flops for count in counts]
    trimmed = sum(2 * (count.full_qkv - count.stored_qkv) for count in counts)
    resized = sum(2 * resize_products(step, config) for step in resize_steps(shape))
    return Budget(
        parameters=sum(count.stored for count in counts)
        + _norm_parameters(shape.layers[-1].width, config)
        + _resize_parameters(shape, config)
        + vocabulary_parameters
        + tables.positions,
        effective_parameters=sum(count.matrices for count in counts) + vocabulary_parameters - wastes.parameters,
        embedding_parameters=vocabulary_parameters + tables.positions,
        flops_per_token=sum(block_flops) - trimmed + resized + 2 * tables.head,
        effective_flops_per_token=sum(block_flops) + 2 * tables.head - 2 * wastes.active_parameters,
        kv_cache_bytes_per_token=sum(_kv_bytes(layer) for layer in shape.layers),
        decode_bytes_per_token=round(decode_bytes_per_token(shape, config, context)),
        context=context,
    )


@dataclass(frozen=True, slots=True)
class EndWastes:
    """Weights of a wide first and last layer that the papers do not count (papers: ><former, parameter matching)."""

    first_qkv: int
    """Query, key and value inputs of layer 1 that only ever see zeros."""
    last_down: int
    """Outputs of the last down-projection that are cut off before the head."""
    last_down_active: int
    """The same, of the experts that one token uses."""

    @property
    def parameters(self) -> int:
        """Both wastes, as stored."""
        return self.first_qkv + self.last_down

    @property
    def active_parameters(self) -> int:
        """Both wastes, as one token multiplies by them."""
        return self.first_qkv + self.last_down_active


def end_wastes(shape: Shape) -> EndWastes:
    """The two terms by which effective counts are smaller than full ones, of a shape as built."""
    first, last = shape.layers[0], shape.layers[-1]
    cut = max(0, last.width - shape.head_width) * last.mlp_hidden
    return EndWastes(
        first_qkv=first.qkv_width * max(0, first.width - shape.embed_width),
        last_down=cut * max(last.experts, 1),
        last_down_active=cut * (last.experts_per_token if last.experts else 1),
    )


def decode_bytes_per_token(shape: Shape, config: ModelConfig, context: int, batch: int = 1) -> float:
    """Bytes of weights and cache that one decoded token costs to read, in a batch of `batch` sequences of `context`.

    The batch shares one pass over the weights. Of a table that is only looked up, each sequence reads one row. Of a
    mixture of experts, the pass reads the experts that the batch is expected to hit under even routing.
    """
    shape = as_built(shape, config)
    tables = _tables(shape, config)
    weights = float(tables.head + _norm_parameters(shape.layers[-1].width, config) + _resize_parameters(shape, config))
    cache = 0
    for layer, width in zip(shape.layers, qkv_input_widths(shape, config), strict=True):
        count = _count_layer(layer, width, config, context)
        weights += count.stored
        if layer.experts:
            share_missed = (1 - layer.experts_per_token / layer.experts) ** batch
            weights -= share_missed * layer.experts * count.expert
        cache += _kv_bytes(layer) * _attended(layer, context)
    rows = shape.embed_width * ((0 if config.tied else 1) + (1 if config.positions == "learned" else 0))
    return _BF16_BYTES * (weights / batch + rows) + cache


@dataclass(frozen=True, slots=True)
class _LayerCount:
    matrices: int
    """All weight matrices, at full width."""
    active_matrices: int
    """Those that one token multiplies by, at full width."""
    full_qkv: int
    stored_qkv: int
    stored: int
    """Everything that is stored: matrices with the trimmed query, key and value inputs, norms, biases."""
    expert: int
    """Parameters of one expert (of the MLP, when dense)."""
    attention_flops: int


def _count_layer(layer: LayerShape, qkv_input: int, config: ModelConfig, context: int) -> _LayerCount:
    full_qkv, stored_qkv = layer.width * layer.qkv_width, qkv_input * layer.qkv_width
    out = layer.heads * layer.value_head_dim * layer.width
    expert = (config.mlp_input_matrices + 1) * layer.width * layer.mlp_hidden
    router = layer.width * layer.experts
    experts, active = (layer.experts, layer.experts_per_token) if layer.experts else (1, 1)

    extras = 0
    expert_biases = 0
    if layer.has_attention:
        extras += _norm_parameters(layer.width, config)
        extras += (layer.qkv_width + layer.width) if config.bias else 0
    if layer.has_mlp:
        extras += _norm_parameters(layer.width, config)
        expert_biases = (config.mlp_input_matrices * layer.mlp_hidden + layer.width) if config.bias else 0
    matrices = full_qkv + out + experts * expert + router
    return _LayerCount(
        matrices=matrices,
        active_matrices=full_qkv + out + active * expert + router,
        full_qkv=full_qkv,
        stored_qkv=stored_qkv,
        stored=matrices - full_qkv + stored_qkv + extras + experts * expert_biases,
        expert=expert + expert_biases,
        attention_flops=2 * layer.heads * (layer.head_dim + layer.value_head_dim) * _attended(layer, context),
    )


@dataclass(frozen=True, slots=True)
class _Tables:
    embedding: int
    head: int
    positions: int


def _tables(shape: Shape, config: ModelConfig) -> _Tables:
    return _Tables(
        embedding=config.vocab_size * shape.embed_width,
        head=config.vocab_size * shape.head_width,
        positions=config.context * shape.embed_width if config.positions == "learned" else 0,
    )


def _norm_parameters(width: int, config: ModelConfig) -> int:
    return width * (2 if config.norm_has_bias else 1)


def _resize_parameters(shape: Shape, config: ModelConfig) -> int:
    return sum(resize_parameters(step, config) for step in resize_steps(shape))


def _kv_bytes(layer: LayerShape) -> int:
    return layer.kv_heads * (layer.head_dim + layer.value_head_dim) * _BF16_BYTES


def _attended(layer: LayerShape, context: int) -> int:
    """Tokens that a query attends to, causality not halved."""
    return context if layer.window is None else min(layer.window, context)
