"""Families: profiles for width, heads and MLP, combined under a name. A family is one function and one decorator.

Every family knows its reference, the straight column that it is compared with: the uniform shape of the same depth and
reference width.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from entasis.errors import ConfigError, ShapeError
from entasis.settings import check_arguments
from entasis.shape import rules
from entasis.shape.match import WidthCost, bowtie_widths
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LARGEST_SIZE, LayerShape, Shape

_T = TypeVar("_T")

PerLayer = int | Sequence[int]
"""One number for every layer, or a list with one per layer."""

LARGEST_DEPTH = 10_000
"""Layers beyond which a request is taken for a slip of the keyboard."""

_COUNTING_CONFIG = ModelConfig(vocab_size=50_257, context=1024)
"""Where no configuration is given: llama style. The sizes do not matter to families: tables cancel in matching."""


@dataclass(frozen=True, slots=True)
class Design:
    """A family's answer to a request: the shape, what it is measured against, and what the rules say of it."""

    family: str
    shape: Shape
    reference: Shape
    """The uniform shape at the same reference width."""
    findings: tuple[rules.Finding, ...] = ()
    """Errors first."""


Build = Callable[..., Design]
FAMILIES: dict[str, Build] = {}


def register_family(name: str) -> Callable[[Build], Build]:
    """Registers a family. The function takes keyword settings and `config`, and returns a Design without findings of
    the general rules, which are added here."""

    def register(build: Build) -> Build:
        FAMILIES[name] = build
        return build

    return register


def family_settings(name: str) -> tuple[str, ...]:
    """The names of a family's settings."""
    return tuple(parameter for parameter in inspect.signature(_find(name)).parameters if parameter != "config")


def design(name: str, settings: Mapping[str, Any], config: ModelConfig | None = None) -> Design:
    """Builds a family's shape and checks it; error findings are returned, not raised.

    Raises:
        ConfigError: an unknown family or setting, or a value of the wrong type; the line names it.
        ShapeError: no shape exists for these settings.
    """
    build = _find(name)
    config = _COUNTING_CONFIG if config is None else config
    arguments = check_arguments(build, settings, known=family_settings(name), owner=f"family {name}")
    made = build(**arguments, config=config)
    found = [*made.findings, *rules.findings(made.shape, config)]
    return Design(name, made.shape, made.reference, tuple(rules.errors_first(found)))


def family(name: str, *, config: ModelConfig | None = None, **settings: Any) -> Shape:  # noqa: ANN401 - any setting
    """A family's shape by name.

    Raises:
        ConfigError: an unknown family or setting, or a value of the wrong type.
        ShapeError: the settings break a rule; the line names the layer and the numbers.
    """
    made = design(name, settings, config)
    rules.require_no_errors(made.findings)
    return made.shape


def _find(name: str) -> Build:
    if name not in FAMILIES:
        raise ConfigError(f"family: unknown family {name!r}; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


# --- the families -----------------------------------------------------------------------------------------------------


@register_family("uniform")
def _uniform(
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    mlp_ratio: float = 4.0,
    mlp_hidden: int | None = None,
    config: ModelConfig,
) -> Design:
    """The straight column: every layer alike."""
    _check_depth(layers)
    _require_positive(width=width, heads=heads, kv_heads=kv_heads, head_dim=head_dim, mlp_ratio=mlp_ratio)
    _require_not_negative(mlp_hidden=mlp_hidden)
    kv_heads = heads if kv_heads is None else kv_heads
    hidden = round(mlp_ratio * width) if mlp_hidden is None else mlp_hidden
    layer = LayerShape(width, heads, kv_heads, width // heads if head_dim is None else head_dim, hidden)
    shape = Shape((layer,) * layers, width)
    return Design("uniform", shape, shape, tuple(rules.divides_width(shape) if head_dim is None else ()))


@register_family("prism")
def _prism(
    *,
    width: int,
    heads: PerLayer,
    layers: int | None = None,
    kv_heads: PerLayer | None = None,
    baseline_heads: int | None = None,
    mlp_ratio: float = 4.0,
    mlp_hidden: int | None = None,
    config: ModelConfig,
) -> Design:
    """Fewer, wider heads in early layers at constant width (Prism Transformer): `heads` per layer, never falling."""
    _require_positive(width=width, baseline_heads=baseline_heads, mlp_ratio=mlp_ratio)
    _require_not_negative(mlp_hidden=mlp_hidden)
    if layers is None:
        if isinstance(heads, int):
            raise ConfigError("layers: missing; a prism with one head count for all layers needs to know how many")
        layers = len(heads)
    _check_depth(layers)
    counts = _per_layer("heads", heads, layers, least=1)
    kv_counts = counts if kv_heads is None else _per_layer("kv_heads", kv_heads, layers, least=1)
    hidden = round(mlp_ratio * width) if mlp_hidden is None else mlp_hidden
    shape = Shape(
        tuple(LayerShape(width, h, kv, width // h, hidden) for h, kv in zip(counts, kv_counts, strict=True)), width
    )
    baseline = counts[-1] if baseline_heads is None else baseline_heads
    reference = _uniform(
        layers=layers,
        width=width,
        heads=baseline,
        kv_heads=kv_counts[-1] if counts[-1] == baseline else None,
        mlp_hidden=hidden,
        config=config,
    ).shape
    return Design("prism", shape, reference, (*rules.divides_width(shape), *rules.prism_rules(shape, baseline)))


@register_family("bowtie")
def _bowtie(
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    mlp_ratio: float = 4.0,
    mlp_hidden: int | None = None,
    bottleneck: float = 0.3,
    turn: int | None = None,
    multiple: int = 32,
    match: Literal["effective"] = "effective",
    config: ModelConfig,
) -> Design:
    """Wide ends and a narrow waist (><former), matched to the uniform shape of `width` by effective parameters.

    The narrowest layer is layer `turn` (from 1; default 0.75 of the layers) with `bottleneck * width` coordinates.
    Every layer has `heads` heads, as published; with `head_dim`, as many heads of that size as fit its width.
    """
    _require_positive(
        width=width, heads=heads, kv_heads=kv_heads, head_dim=head_dim, mlp_ratio=mlp_ratio, multiple=multiple
    )
    _require_not_negative(mlp_hidden=mlp_hidden)
    _check_depth(layers)
    if layers < 3:
        raise ConfigError(f"layers: a bowtie needs at least 3 (wide, narrow, wide), got {layers}")
    turn = min(max(round(0.75 * layers), 2), layers - 1) if turn is None else turn
    if not 2 <= turn <= layers - 1:
        raise ConfigError(f"turn: expected a layer from 2 to {layers - 1} of {layers}, got {turn}")
    if not 0 < bottleneck <= 1:
        raise ConfigError(f"bottleneck: expected above 0 and at most 1, got {bottleneck}")
    kv_heads = heads if kv_heads is None else kv_heads
    cost = _width_cost(config, kv_share=kv_heads / heads, mlp_ratio=mlp_ratio, mlp_hidden=mlp_hidden)
    widths = bowtie_widths(cost, layers=layers, width=width, bottleneck=bottleneck, turn=turn, multiple=multiple)

    def layer(layer_width: int) -> LayerShape:
        hidden = round(mlp_ratio * layer_width) if mlp_hidden is None else mlp_hidden
        if head_dim is None:
            return LayerShape(layer_width, heads, kv_heads, layer_width // heads, hidden)
        count = max(1, round(layer_width / head_dim))
        return LayerShape(layer_width, count, _grouped(count, heads / kv_heads), head_dim, hidden)

    shape = Shape(tuple(layer(layer_width) for layer_width in widths), width)
    reference = Shape((layer(width),) * layers, width)
    found = [] if head_dim else rules.divides_width(shape)
    if found:
        even = 2 * heads
        found.append(rules.Finding("warning", None, f"with multiple: {even} (twice the {heads} heads) every layer's "
                                   "width divides into even heads"))  # fmt: skip
    if not head_dim and width % heads:
        found.append(rules.Finding("warning", None, f"{heads} heads do not divide the reference width {width}, so "
                                   "the uniform shape beside this one is only counted, not buildable"))  # fmt: skip
    return Design("bowtie", shape, reference, tuple(found))


@register_family("explicit")
def _explicit(
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


# --- the families as functions ----------------------------------------------------------------------------------------


def uniform(*, layers: int, width: int, heads: int, config: ModelConfig | None = None, **settings: Any) -> Shape:  # noqa: ANN401
    """Every layer alike. Further settings: kv_heads, head_dim, mlp_ratio (4), mlp_hidden. Raises as `family`."""
    return family("uniform", config=config, layers=layers, width=width, heads=heads, **settings)


def prism(*, width: int, heads: PerLayer, config: ModelConfig | None = None, **settings: Any) -> Shape:  # noqa: ANN401
    """Head counts per layer at constant width. Further settings: layers, kv_heads, baseline_heads, mlp_ratio (4),
    mlp_hidden. Raises as `family`."""
    return family("prism", config=config, width=width, heads=heads, **settings)


def bowtie(*, layers: int, width: int, heads: int, config: ModelConfig | None = None, **settings: Any) -> Shape:  # noqa: ANN401
    """Wide ends, narrow waist, at the effective parameters of the uniform shape of `width`. Further settings:
    bottleneck (0.3), turn (0.75 of the layers), multiple (32), kv_heads, head_dim, mlp_ratio (4), mlp_hidden.
    Raises as `family`."""
    return family("bowtie", config=config, layers=layers, width=width, heads=heads, **settings)


def explicit(
    *,
    layers: Sequence[Mapping[str, Any]],
    embed_width: int,
    config: ModelConfig | None = None,
    unembed_width: int | None = None,
) -> Shape:
    """A shape written out layer by layer. Raises as `family`."""
    return family("explicit", config=config, layers=layers, embed_width=embed_width, unembed_width=unembed_width)


# --- parts ------------------------------------------------------------------------------------------------------------


def _width_cost(config: ModelConfig, *, kv_share: float, mlp_ratio: float, mlp_hidden: int | None) -> WidthCost:
    """Costs of a layer whose heads together are as wide as the layer; `kv_share` is kv_heads / heads."""
    matrices = config.mlp_input_matrices + 1
    qkv = 1 + 2 * kv_share
    # Hidden units: `ratio` per coordinate of width, or a fixed number.
    ratio, fixed = (mlp_ratio, 0.0) if mlp_hidden is None else (0.0, float(mlp_hidden))
    return WidthCost(
        square=qkv + 1 + matrices * ratio,
        line=matrices * fixed,
        first_waste_square=qkv,
        last_waste_square=ratio,
        last_waste_fixed=fixed,
    )


def _check_depth(layers: int) -> None:
    if not 1 <= layers <= LARGEST_DEPTH:
        raise ConfigError(f"layers: expected from 1 to {LARGEST_DEPTH}, got {layers}")


def _require_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name}: expected above 0, got {value}")
        _require_at_most(name, value)


def _require_not_negative(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 0:
            raise ConfigError(f"{name}: expected at least 0, got {value}")
        _require_at_most(name, value)


def _require_at_most(name: str, value: float | None) -> None:
    if value is not None and value > LARGEST_SIZE:
        raise ConfigError(f"{name}: expected at most {LARGEST_SIZE}, got {value}")


def _per_layer(name: str, value: PerLayer, layers: int, least: int) -> list[int]:
    values = [value] * layers if isinstance(value, int) else list(value)
    if len(values) != layers:
        raise ConfigError(f"{name}: {len(values)} values for {layers} layers; give one per layer")
    for number, each in enumerate(values, start=1):
        if each < least:
            raise ShapeError(f"{name} {each}; expected at least {least}", number)
    return values


def _grouped(heads: int, group: float) -> int:
    """The largest key/value head count that divides `heads` into groups of at least `group` query heads."""
    wanted = max(1.0, heads / group)
    return max(divisor for divisor in rules.divisors(heads) if divisor <= wanted)


def _heads_slice_width(layer: LayerShape) -> bool:
    return layer.has_attention and layer.value_dim is None and layer.heads * layer.head_dim == layer.width


def _most_common(values: Iterable[_T]) -> _T:
    return Counter(values).most_common(1)[0][0]
