"""Head schedules at constant width: the Prism Transformer's, by list or by rule, and the controls that break its order.

Parameters and FLOPs do not depend on how a width is sliced into heads, so these shapes match the uniform one on every
budget without being scaled (unless key/value heads are grouped: wider ones then cost more).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from entasis.errors import ConfigError, ShapeError
from entasis.shape import rules
from entasis.shape.columns import column
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape
from entasis.shape.registry import (
    Design,
    PerLayer,
    per_layer,
    register_family,
    require_depth,
    require_not_negative,
    require_positive,
)

_HOLD = 3
"""Layers that a prism by rule holds a head dim for, unless asked otherwise: the middle of Prism's 2 to 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrismSettings:
    """A head schedule: `heads` per layer; or, with `early_head_dim`, the baseline's one number and a rule.

    By rule the first `hold` (3) layers have heads of `early_head_dim`, and each further `hold` layers heads half as
    wide, down to the baseline's, which at least `baseline_share` (0.5) of the layers keep.
    """

    width: int
    heads: PerLayer
    layers: int | None = None
    kv_heads: PerLayer | None = None
    baseline_heads: int | None = None
    early_head_dim: int | None = None
    hold: int | None = None
    baseline_share: float | None = None
    mlp_ratio: float = 4.0
    mlp_hidden: int | None = None
    config: ModelConfig


@register_family("prism", PrismSettings)
def prism_family(prism: PrismSettings) -> Design:
    """Fewer, wider heads in early layers at constant width (Prism Transformer): `heads` per layer, never falling.

    With `early_head_dim`, `heads` is the baseline's one number and the schedule follows the rule.
    """
    listed, baseline_heads = prism.heads, prism.baseline_heads
    if prism.early_head_dim is not None:
        baseline_heads, listed = _rule(prism, prism.early_head_dim)
    elif prism.hold is not None or prism.baseline_share is not None:
        name = "baseline_share" if prism.hold is None else "hold"
        raise ConfigError(f"{name}: belongs to a prism by rule, which needs early_head_dim, too")
    shape, reference, baseline = _sliced(
        prism.width, listed, prism.layers, prism.kv_heads, baseline_heads, prism.mlp_ratio, prism.mlp_hidden
    )
    return Design("prism", shape, reference, (*rules.divides_width(shape), *rules.prism_rules(shape, baseline)))


@register_family("prism-reversed", PrismSettings)
def prism_reversed_family(prism: PrismSettings) -> Design:
    """Prism's control: a prism's schedule from the last layer to the first, narrow heads early.

    The settings are those of the prism that is turned round.
    """
    made = prism_family(prism)
    shape = Shape(made.shape.layers[::-1], prism.width)
    broken = [
        rules.Finding("error", None, f"the schedule to be turned round is no prism: {finding}")
        for finding in rules.prism_rules(made.shape, made.reference.layers[0].heads)
        if finding.level == "error"
    ]
    return Design("prism-reversed", shape, made.reference, (*rules.divides_width(shape), *broken))


@register_family("prism-abrupt")
def prism_abrupt_family(
    *,
    layers: int,
    width: int,
    heads: int,
    early_heads: int,
    early_layers: int,
    kv_heads: int | None = None,
    mlp_ratio: float = 4.0,
    mlp_hidden: int | None = None,
    config: ModelConfig,
) -> Design:
    """Prism's control: `early_layers` layers of `early_heads` heads, then the baseline's at once."""
    require_depth(layers)
    require_positive(heads=heads, early_heads=early_heads)
    if not 0 <= early_layers <= layers:
        raise ConfigError(f"early_layers: expected from 0 to {layers}, got {early_layers}")
    schedule = [early_heads] * early_layers + [heads] * (layers - early_layers)
    shape, reference, _ = _sliced(width, schedule, layers, kv_heads, heads, mlp_ratio, mlp_hidden)
    return Design("prism-abrupt", shape, reference, tuple(rules.divides_width(shape)))


@register_family("all-wide")
def all_wide_family(
    *,
    layers: int,
    width: int,
    heads: int,
    wide_heads: int,
    kv_heads: int | None = None,
    mlp_ratio: float = 4.0,
    mlp_hidden: int | None = None,
    config: ModelConfig,
) -> Design:
    """Prism's control: `wide_heads` heads in every layer, beside the uniform shape with `heads`."""
    require_depth(layers)
    require_positive(heads=heads, wide_heads=wide_heads)
    shape, reference, _ = _sliced(width, wide_heads, layers, kv_heads, heads, mlp_ratio, mlp_hidden)
    return Design("all-wide", shape, reference, tuple(rules.divides_width(shape)))


def early_head_dims(early_head_dim: int, baseline_head_dim: int) -> list[int]:
    """Head dims before the baseline's: `early_head_dim` and its halves, as long as they are wider."""
    dims = []
    dim = early_head_dim
    while dim > baseline_head_dim:
        dims.append(dim)
        dim //= 2
    return dims


def _rule(prism: PrismSettings, early_head_dim: int) -> tuple[int, list[int]]:
    """The baseline's heads and the schedule by rule."""
    width, heads, layers = prism.width, prism.heads, prism.layers
    hold = _HOLD if prism.hold is None else prism.hold
    baseline_share = rules.BASELINE_SHARE if prism.baseline_share is None else prism.baseline_share
    if prism.baseline_heads not in (None, heads):
        raise ConfigError(
            f"baseline_heads: {prism.baseline_heads} beside heads {heads}; with early_head_dim, heads is the "
            "baseline's one number"
        )
    if not isinstance(heads, int):
        raise ConfigError("heads: with early_head_dim the schedule follows from it; give the baseline's one number")
    if layers is None:
        raise ConfigError("layers: missing; a prism by rule needs to know how many")
    require_depth(layers)
    require_positive(width=width, heads=heads, early_head_dim=early_head_dim, hold=hold)
    if not 0 <= baseline_share <= 1:
        raise ConfigError(f"baseline_share: expected from 0 to 1, got {baseline_share}")
    if early_head_dim < width // heads:
        raise ConfigError(f"early_head_dim: expected at least the baseline's {width // heads}, got {early_head_dim}")
    dims = early_head_dims(early_head_dim, width // heads)
    for dim in dims:
        if width % dim:
            raise ShapeError(f"early_head_dim: heads of {dim} do not divide width {width}; choose another one")
    early = len(dims) * hold
    kept = math.ceil(round(baseline_share * layers, 6))  # 0.55 of 20 layers are 11, not 11.000000000000002
    if early + kept > layers:
        raise ShapeError(
            f"hold: {len(dims)} head dims ({', '.join(map(str, dims))}) held for {hold} layers each leave "
            f"{layers - early} of {layers} layers at the baseline, baseline_share {baseline_share} wants {kept}; "
            "lower hold or early_head_dim"
        )
    return heads, [width // dim for dim in dims for _ in range(hold)] + [heads] * (layers - early)


def _sliced(
    width: int,
    heads: PerLayer,
    layers: int | None,
    kv_heads: PerLayer | None,
    baseline_heads: int | None,
    mlp_ratio: float,
    mlp_hidden: int | None,
) -> tuple[Shape, Shape, int]:
    """A constant width sliced into heads per layer; its uniform reference; the baseline's head count."""
    require_positive(width=width, baseline_heads=baseline_heads, mlp_ratio=mlp_ratio)
    require_not_negative(mlp_hidden=mlp_hidden)
    if layers is None:
        if isinstance(heads, int):
            raise ConfigError("layers: missing; a prism with one head count for all layers needs to know how many")
        layers = len(heads)
    require_depth(layers)
    counts = per_layer("heads", heads, layers, least=1)
    kv_counts: Sequence[int] = counts if kv_heads is None else per_layer("kv_heads", kv_heads, layers, least=1)
    hidden = round(mlp_ratio * width) if mlp_hidden is None else mlp_hidden
    shape = Shape(
        tuple(LayerShape(width, h, kv, width // h, hidden) for h, kv in zip(counts, kv_counts, strict=True)), width
    )
    baseline = counts[-1] if baseline_heads is None else baseline_heads
    if isinstance(kv_heads, int):
        reference_kv: int | None = kv_heads
    else:
        reference_kv = kv_counts[-1] if kv_heads is not None and counts[-1] == baseline else None
    reference = column(layers, width, baseline, reference_kv, mlp_hidden=hidden)
    return shape, reference, baseline
