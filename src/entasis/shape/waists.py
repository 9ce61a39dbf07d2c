"""Shapes whose residual width changes with depth: bowtie, diamond, growing, narrowing, half-first and prism-bowtie."""

from __future__ import annotations

from entasis.errors import ConfigError, ShapeError
from entasis.shape import rules
from entasis.shape.chains import Waist, WaistSettings
from entasis.shape.columns import column
from entasis.shape.match import Match, matched
from entasis.shape.model_config import ModelConfig
from entasis.shape.prisms import early_head_dims
from entasis.shape.records import LayerShape, Shape
from entasis.shape.registry import Design, register_family, require_depth, require_positive, rounded


@register_family("bowtie", WaistSettings)
def bowtie_family(common: WaistSettings, *, bottleneck: float = 0.3, turn: int | None = None) -> Design:
    """Wide ends and a narrow waist (><former), matched to the uniform shape of `width`.

    The narrowest layer is layer `turn` (from 1; default 0.75 of the layers) with `bottleneck * width` coordinates.
    Every layer has `heads` heads, as published; with `head_dim`, as many heads of that size as come nearest to its
    width. Without `head_dim_multiple` and `mlp_multiple` the widths are the published solver's.
    """
    _require_share(bottleneck=bottleneck)
    return Waist.of(common, turn=_inner_turn(common.layers, turn), ratio=bottleneck).design("bowtie")


@register_family("diamond", WaistSettings)
def diamond_family(common: WaistSettings, *, peak: float = 1.5, turn: int | None = None) -> Design:
    """Narrow ends and a wide middle: the widest layer is layer `turn` with `peak * width` coordinates."""
    if not peak >= 1:
        raise ConfigError(f"peak: expected at least 1, got {peak}")
    require_positive(peak=peak)
    return Waist.of(common, turn=_inner_turn(common.layers, turn), ratio=peak).design("diamond")


@register_family("growing", WaistSettings)
def growing_family(common: WaistSettings, *, last: float = 1.5) -> Design:
    """Wider with depth, up to `last * width` in the last layer."""
    if not last >= 1:
        raise ConfigError(f"last: expected at least 1 in a growing shape, got {last}")
    require_positive(last=last)
    require_depth(common.layers, 2, " in a growing shape")
    return Waist.of(common, turn=common.layers, ratio=last).design("growing")


@register_family("narrowing", WaistSettings)
def narrowing_family(common: WaistSettings, *, last: float = 0.3) -> Design:
    """Narrower with depth, down to `last * width` in the last layer."""
    _require_share(last=last)
    require_depth(common.layers, 2, " in a narrowing shape")
    return Waist.of(common, turn=common.layers, ratio=last).design("narrowing")


@register_family("prism-bowtie")
def prism_bowtie_family(
    *,
    layers: int,
    width: int,
    heads: int,
    mlp_ratio: float = 4.0,
    bottleneck: float = 0.3,
    turn: int | None = None,
    multiple: int = 64,
    head_dim_multiple: int | None = None,
    mlp_multiple: int = 1,
    early_head_dim: int = 256,
    hold: int = 3,
    match: Match = "effective",
    config: ModelConfig,
) -> Design:
    """Both papers at once: a bowtie's widths, sliced into heads whose dims fall as a prism's.

    The first `hold` layers have heads of `early_head_dim`, each further `hold` layers heads half as wide, down to the
    baseline's `width / heads`, all rounded to `head_dim_multiple`. A layer has as many heads of its dim as come nearest
    to its width, at least one.
    """
    _require_share(bottleneck=bottleneck)
    require_positive(
        width=width, heads=heads, early_head_dim=early_head_dim, hold=hold, head_dim_multiple=head_dim_multiple
    )
    turn = _inner_turn(layers, turn)
    if width % heads:
        raise ShapeError(f"{heads} heads do not divide the reference width {width}, so there is no baseline head dim")
    baseline = width // heads
    early = [dim for dim in early_head_dims(early_head_dim, baseline) for _ in range(min(hold, layers))]
    dims = [*early, *[baseline] * layers][:layers]
    if head_dim_multiple is not None:
        dims = [rounded(dim, head_dim_multiple) for dim in dims]
    waist = Waist(
        layers=layers, width=width, heads=heads, head_dim=baseline, head_dims=dims, mlp_ratio=mlp_ratio, turn=turn,
        ratio=bottleneck, multiple=multiple, head_dim_multiple=head_dim_multiple, mlp_multiple=mlp_multiple,
        match=match, config=config,
    )  # fmt: skip
    return waist.design("prism-bowtie")


@register_family("half-first")
def half_first_family(
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int | None = None,
    mlp_ratio: float = 4.0,
    first: float = 0.5,
    multiple: int | None = None,
    head_dim_multiple: int | None = None,
    mlp_multiple: int = 1,
    match: Match = "effective",
    config: ModelConfig,
) -> Design:
    """A narrow embedding and first block (nanochat's experiment): `first * width` wide, the head and the rest full.

    The other layers are widened until the budget matches, in steps of `multiple` (twice the heads, so that head dims
    are even, unless given); a narrow embedding needs untied tables.
    """
    require_depth(layers, 2, " where the first is narrower")
    require_positive(
        width=width, heads=heads, kv_heads=kv_heads, mlp_ratio=mlp_ratio, multiple=multiple,
        head_dim_multiple=head_dim_multiple, mlp_multiple=mlp_multiple,
    )  # fmt: skip
    _require_share(first=first)
    step = 2 * heads if multiple is None else multiple
    narrow = rounded(first * width, step)

    def layer(layer_width: int) -> LayerShape:
        return LayerShape(
            layer_width, heads, heads if kv_heads is None else kv_heads,
            layer_width // heads if head_dim_multiple is None else rounded(layer_width / heads, head_dim_multiple),
            round(mlp_ratio * layer_width) if mlp_multiple == 1 else rounded(mlp_ratio * layer_width, mlp_multiple),
        )  # fmt: skip

    def build(scale: float) -> Shape:
        rest = layer(rounded(scale * width, step))
        return Shape((layer(narrow),) + (rest,) * (layers - 1), embed_width=narrow, unembed_width=width)

    reference = column(layers, width, heads, kv_heads, mlp_ratio=mlp_ratio)
    exact = head_dim_multiple is None and mlp_multiple == 1
    shape = reference if first == 1 and exact else matched(build, reference, match, config)
    found = rules.divides_width(shape) if head_dim_multiple is None else []
    return Design("half-first", shape, reference, tuple(found))


def _require_share(**values: float) -> None:
    """Raises a ConfigError naming the first value that is no share of the reference width."""
    for name, value in values.items():
        if not 0 < value <= 1:
            raise ConfigError(f"{name}: expected above 0 and at most 1, got {value}")


def _inner_turn(layers: int, turn: int | None) -> int:
    """The turning layer, which has neighbours on both sides; by default 0.75 of the layers."""
    require_depth(layers, 3, " where the width turns inside")
    turn = min(max(round(0.75 * layers), 2), layers - 1) if turn is None else turn
    if not 2 <= turn <= layers - 1:
        raise ConfigError(f"turn: expected a layer from 2 to {layers - 1} of {layers}, got {turn}")
    return turn
