"""The straight column, which all others are measured against, and shapes written out layer by layer."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from entasis.shape import rules
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape
from entasis.shape.registry import (
    Design,
    register_family,
    require_depth,
    require_experts,
    require_not_negative,
    require_positive,
)

_T = TypeVar("_T")


@register_family("uniform")
def uniform_family(
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    mlp_ratio: float = 4.0,
    mlp_hidden: int | None = None,
    experts: int = 0,
    experts_per_token: int = 0,
    expert_hidden: int | None = None,
    config: ModelConfig,
) -> Design:
    """The straight column: every layer alike. With `experts`, each has `expert_hidden` hidden units."""
    require_depth(layers)
    require_positive(width=width, heads=heads, kv_heads=kv_heads, head_dim=head_dim, mlp_ratio=mlp_ratio)
    require_not_negative(mlp_hidden=mlp_hidden)
    require_experts(experts, experts_per_token, expert_hidden, mlp_hidden)
    hidden = expert_hidden if experts else mlp_hidden
    plain = column(layers, width, heads, kv_heads, head_dim, mlp_ratio, hidden).layers[0]
    layer = dataclasses.replace(plain, experts=experts, experts_per_token=experts_per_token)
    shape = Shape((layer,) * layers, width)
    return Design("uniform", shape, shape, tuple(rules.divides_width(shape) if head_dim is None else ()))


def column(
    layers: int,
    width: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    mlp_ratio: float = 4.0,
    mlp_hidden: int | None = None,
) -> Shape:
    """A uniform shape from settings that are checked; the reference of most families."""
    layer = LayerShape(
        width=width,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=width // heads if head_dim is None else head_dim,
        mlp_hidden=round(mlp_ratio * width) if mlp_hidden is None else mlp_hidden,
    )
    return Shape((layer,) * layers, width)


@register_family("explicit")
def explicit_family(
    *,
    layers: Sequence[Any],
    embed_width: int,
    unembed_width: int | None = None,
    config: ModelConfig,
) -> Design:
    """A shape written out layer by layer, with the fields of LayerShape."""
    shape = Shape.from_dict({"layers": layers, "embed_width": embed_width, "unembed_width": unembed_width})
    return Design("explicit", shape, straightened(shape))


def straightened(shape: Shape) -> Shape:
    """The uniform shape that stands beside a free one: its depth, its embedding width, its most common proportions.

    Where the heads slice their layer's width, as is usual, they do so in the uniform shape.
    """
    width = shape.embed_width
    mlp_ratio = _most_common(layer.mlp_hidden / layer.width for layer in shape.layers)
    heads, kv_heads, head_dim, value_dim = _most_common(
        (layer.heads, layer.kv_heads, None if _heads_slice_width(layer) else layer.head_dim, layer.value_dim)
        for layer in shape.layers
    )
    if head_dim is None:
        head_dim = max(1, width // heads)
    layer = LayerShape(width, heads, kv_heads, head_dim, round(mlp_ratio * width), value_dim)
    return Shape((layer,) * len(shape.layers), width)


def _heads_slice_width(layer: LayerShape) -> bool:
    return layer.has_attention and layer.value_dim is None and layer.heads * layer.head_dim == layer.width


def _most_common(values: Iterable[_T]) -> _T:
    return Counter(values).most_common(1)[0][0]
