"""Shapes of constant width whose MLP (and heads) change with depth: tapered, OpenELM's, crown, frame, reverse."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from entasis.errors import ConfigError, ShapeError
from entasis.settings import nearest, shorten
from entasis.shape import rules
from entasis.shape.columns import column
from entasis.shape.match import Match, matched
from entasis.shape.model_config import ModelConfig
from entasis.shape.profiles import PROFILES, Profile, linear
from entasis.shape.records import LayerShape, Shape
from entasis.shape.registry import Design, register_family, require_depth, require_positive, rounded


@register_family("tapered")
def tapered_family(
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int | None = None,
    mlp_ratio: float = 4.0,
    first: float = 1.5,
    last: float = 0.5,
    curve: str = "cosine",
    mlp_multiple: int = 8,
    match: Match = "effective",
    config: ModelConfig,
) -> Design:
    """A wide MLP early and a narrow one late (Tapered Language Models): from `first` to `last` times the usual one.

    `curve` is the name of a profile from a first to a last number: cosine, linear, sigmoid, or one of your own.
    """
    require_depth(layers)
    require_positive(
        width=width, heads=heads, kv_heads=kv_heads, mlp_ratio=mlp_ratio, first=first, last=last,
        mlp_multiple=mlp_multiple,
    )  # fmt: skip
    shares = _curve(curve, layers, first, last)

    def build(scale: float) -> Shape:
        hidden = [rounded(scale * share * mlp_ratio * width, mlp_multiple) for share in shares]
        return _with_mlps(width, heads, heads if kv_heads is None else kv_heads, hidden)

    reference = column(layers, width, heads, kv_heads, mlp_ratio=mlp_ratio)
    shape = matched(build, reference, match, config)
    return Design("tapered", shape, reference, tuple(rules.divides_width(shape)))


@register_family("openelm")
def openelm_family(
    *,
    layers: int,
    width: int,
    head_dim: int = 64,
    group: int = 4,
    heads_first: float = 0.5,
    heads_last: float = 1.0,
    mlp_first: float = 0.5,
    mlp_last: float = 4.0,
    mlp_multiple: int = 256,
    match: Match | None = None,
    config: ModelConfig,
) -> Design:
    """OpenELM's layer-wise scaling: more heads and a wider MLP with depth, `group` query heads per key/value head.

    Both multipliers grow on a line, rounded to two decimals; heads together are `multiplier * width` wide, rounded to
    whole groups; hidden units are rounded to `mlp_multiple`. Rounding never takes more than a tenth away. Published
    shapes are not matched to anything; `match` scales the MLP until the uniform shape's budget is met.
    """
    require_depth(layers)
    require_positive(
        width=width, head_dim=head_dim, group=group, heads_first=heads_first, heads_last=heads_last,
        mlp_first=mlp_first, mlp_last=mlp_last, mlp_multiple=mlp_multiple,
    )  # fmt: skip
    unit = group * head_dim
    head_shares = [round(share, 2) for share in linear(layers, heads_first, heads_last)]
    mlp_shares = [round(share, 2) for share in linear(layers, mlp_first, mlp_last)]
    heads = [_divisible(share * width, unit) // head_dim for share in head_shares]

    def build(scale: float) -> Shape:
        return Shape(
            tuple(
                LayerShape(width, count, count // group, head_dim, _divisible(scale * share * width, mlp_multiple))
                for count, share in zip(heads, mlp_shares, strict=True)
            ),
            width,
        )

    most = _divisible(heads_last * width, unit) // head_dim
    reference = column(layers, width, most, most // group, head_dim)
    shape = build(1.0) if match is None else matched(build, reference, match, config)
    return Design("openelm", shape, reference)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledSettings:
    """What crown, frame and reverse have in common: one width, one head dim, one number of key/value heads."""

    layers: int
    width: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    mlp_ratio: float = 4.0
    mlp_multiple: int = 8
    match: Match = "effective"
    config: ModelConfig


@register_family("crown", ScaledSettings)
def crown_family(common: ScaledSettings, *, ends: float = 0.5, middle: float = 1.5) -> Design:
    """Query heads and MLP small at both ends and large in the middle (Crown, Frame, Reverse)."""
    return _scaled("crown", common, (ends, middle, ends))


@register_family("frame", ScaledSettings)
def frame_family(common: ScaledSettings, *, ends: float = 1.5, middle: float = 0.5) -> Design:
    """Query heads and MLP large at both ends and small in the middle (Crown, Frame, Reverse)."""
    return _scaled("frame", common, (ends, middle, ends))


@register_family("reverse", ScaledSettings)
def reverse_family(common: ScaledSettings, *, first: float = 1.5, last: float = 0.5) -> Design:
    """Query heads and MLP falling with depth, OpenELM turned round (Crown, Frame, Reverse)."""
    return _scaled("reverse", common, (first, last))


def _scaled(name: str, common: ScaledSettings, points: Sequence[float]) -> Design:
    """Query heads and MLP by straight lines through `points` (first, [middle,] last). The MLP is scaled until the
    budget matches."""
    layers, width, heads, kv_heads, head_dim = (
        common.layers, common.width, common.heads, common.kv_heads, common.head_dim
    )  # fmt: skip
    mlp_ratio, mlp_multiple = common.mlp_ratio, common.mlp_multiple
    require_depth(layers, len(points), f" in a {name}")
    require_positive(
        width=width, heads=heads, kv_heads=kv_heads, head_dim=head_dim, mlp_ratio=mlp_ratio, mlp_multiple=mlp_multiple
    )
    for point in points:
        if not 0 < point < math.inf:
            raise ConfigError(f"{name}: multipliers are above 0, got {point}")
    if head_dim is None and width % heads:
        raise ShapeError(f"{heads} heads do not divide width {width}, so there is no head dim; give head_dim, or heads "
                         "that divide it")  # fmt: skip
    if kv_heads is not None and heads % kv_heads:
        raise ConfigError(f"kv_heads: {kv_heads} do not divide {heads} heads into groups")
    shares = _through(points, layers)
    dim = width // heads if head_dim is None else head_dim
    kv = math.gcd(heads, 4) if kv_heads is None else kv_heads
    counts = [rounded(share * heads, kv) for share in shares]

    def build(scale: float) -> Shape:
        hidden = [rounded(scale * share * mlp_ratio * width, mlp_multiple) for share in shares]
        return Shape(
            tuple(LayerShape(width, count, kv, dim, units) for count, units in zip(counts, hidden, strict=True)), width
        )

    reference = column(layers, width, heads, kv, dim, mlp_ratio)
    return Design(name, matched(build, reference, common.match, common.config), reference)


def _with_mlps(width: int, heads: int, kv_heads: int, hidden: Sequence[int]) -> Shape:
    return Shape(tuple(LayerShape(width, heads, kv_heads, width // heads, units) for units in hidden), width)


def _curve(name: str, layers: int, first: float, last: float) -> list[float]:
    """One number per layer by the named profile."""
    known = sorted(each for each, profile in PROFILES.items() if _has_ends(profile))
    if name not in known:
        raise ConfigError(f"curve: unknown profile {name!r}{nearest(name, known)}; from a first to a last number go "
                          f"{', '.join(known)}")  # fmt: skip
    shares = PROFILES[name](layers, first, last)
    if len(shares) != layers or not all(0 < share < math.inf for share in shares):
        raise ConfigError(f"curve: profile {name} does not give {layers} numbers above 0: {shorten(shares)}")
    return shares


def _has_ends(profile: Profile) -> bool:
    """Whether a profile goes from a first to a last number and needs nothing else."""
    try:
        inspect.signature(profile).bind(1, first=1.0, last=1.0)
    except TypeError:
        return False
    return True


def _through(points: Sequence[float], layers: int) -> list[float]:
    """One number per layer on straight lines through evenly spaced points."""
    values = []
    for index in range(layers):
        position = index / (layers - 1) * (len(points) - 1) if layers > 1 else 0.0
        left = min(int(position), len(points) - 2)
        values.append(points[left] + (points[left + 1] - points[left]) * (position - left))
    return values


def _divisible(value: float, divisor: int) -> int:
    """The nearest multiple (halves up), but at least one, and never below nine tenths of the value."""
    nearest = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return nearest + divisor if nearest < 0.9 * value else nearest
