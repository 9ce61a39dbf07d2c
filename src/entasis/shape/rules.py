"""What makes a shape valid (errors) and what makes it slow or unusual (warnings). A finding names layer and numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from entasis.errors import ShapeError
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape

KERNEL_DIM_MULTIPLE = 8
"""Fused attention pads head dims to a multiple of this."""
KERNEL_DIM_LIMIT = 256
"""Fused attention kernels stop here."""
RECOMPILE_LIMIT = 8
"""Distinct graphs that torch.compile makes of one function before it falls back to eager."""
HOLD_LAYERS = (2, 4)
"""Prism's staircase smoothness: layers for which a head dim is held before it changes (Prism Transformer)."""
BASELINE_SHARE = 0.5
"""Prism's baseline preservation: least share of layers with the baseline head count (Prism Transformer)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a rule says about a shape."""

    level: Literal["error", "warning"]
    layer: int | None
    """Counted from 1; None: the finding is about the whole shape."""
    message: str

    def __str__(self) -> str:
        return self.message if self.layer is None else f"layer {self.layer}: {self.message}"


def findings(shape: Shape, config: ModelConfig) -> list[Finding]:
    """All that the general rules find in `shape`, errors first."""
    found = list(_shape_rules(shape, config))
    for number, layer in enumerate(shape.layers, start=1):
        found += [Finding("error", number, message) for message in _layer_errors(layer, config)]
        if not layer.has_attention and not layer.has_mlp:
            found.append(Finding("warning", number, "has neither attention nor MLP, so it changes nothing"))
        found += [Finding("warning", number, message) for message in _kernel_warnings(layer)]
    return errors_first(found)


def errors_first(found: Sequence[Finding]) -> list[Finding]:
    """The findings with errors before warnings, otherwise in their order."""
    return sorted(found, key=lambda finding: finding.level != "error")


def require_no_errors(found: Sequence[Finding]) -> None:
    """Raises a ShapeError with the first error; further errors are counted."""
    errors = [finding for finding in found if finding.level == "error"]
    if errors:
        others = len(errors) - 1
        more = f" (and {others} more error{'s' * (others > 1)})" if others else ""
        raise ShapeError(f"{errors[0]}{more}")


def require_valid(shape: Shape, config: ModelConfig) -> None:
    """Raises a ShapeError when a general rule finds an error."""
    require_no_errors(findings(shape, config))


def divides_width(shape: Shape) -> list[Finding]:
    """The rule of families that slice a layer's width into heads: the head count divides the width."""
    return [
        Finding("error", number, f"{layer.heads} heads do not divide width {layer.width}; "
                f"near choices: {_near_divisors(layer.width, layer.heads)}")
        for number, layer in enumerate(shape.layers, start=1)
        if layer.heads and layer.width % layer.heads
    ]  # fmt: skip


def prism_rules(shape: Shape, baseline_heads: int) -> list[Finding]:
    """The constraints (errors) and guidelines (warnings) of the Prism Transformer's head schedules."""
    heads = [layer.heads for layer in shape.layers]
    found = []
    for number in range(2, len(heads) + 1):
        before, here = heads[number - 2], heads[number - 1]
        if here < before:
            found.append(Finding("error", number, f"{here} heads after {before}: a prism's head count never falls; "
                                 "use an explicit shape for other orders"))  # fmt: skip
    if heads[-1] != baseline_heads:
        found.append(Finding("error", len(heads), f"the last layer has {heads[-1]} heads, the baseline "
                             f"{baseline_heads}; a prism ends at its baseline"))  # fmt: skip
    least, most = HOLD_LAYERS
    for first, hold in _runs(heads):
        if heads[first - 1] != baseline_heads and not least <= hold <= most:
            layer = shape.layers[first - 1]
            found.append(Finding("warning", first, f"head dim {layer.head_dim} is held for {hold} "
                                 f"layer{'s' * (hold > 1)}; Prism's guideline is {least} to {most}"))  # fmt: skip
    kept = heads.count(baseline_heads)
    if kept < BASELINE_SHARE * len(heads):
        found.append(Finding("warning", None, f"{kept} of {len(heads)} layers have the baseline's {baseline_heads} "
                             "heads; Prism's guideline is at least half"))  # fmt: skip
    return found


def _shape_rules(shape: Shape, config: ModelConfig) -> Iterator[Finding]:
    if config.tied and shape.embed_width != shape.head_width:
        yield Finding("error", None, f"embed_width {shape.embed_width} and unembed_width {shape.head_width} differ, "
                      "but tied embeddings share one table; make them equal or set tied: false")  # fmt: skip
    if config.resize == "constant" and shape.embed_width != shape.head_width:
        yield Finding("error", None, f"embed_width {shape.embed_width} and unembed_width {shape.head_width} differ, "
                      "but a constant stream has one width; make them equal or set resize: carry")  # fmt: skip
    if shape.distinct_layers > RECOMPILE_LIMIT:
        yield Finding("warning", None, f"{shape.distinct_layers} distinct layer shapes; the compiler's recompile limit "
                      f"is {RECOMPILE_LIMIT}, so compile the model as a whole, not block by block")  # fmt: skip


def _layer_errors(layer: LayerShape, config: ModelConfig) -> Iterator[str]:
    if layer.window is not None and not config.causal:
        yield f"window {layer.window}: windows end at the token itself, so they need causal: true; leave one out"
    if layer.window is not None and not layer.has_attention:
        yield f"window {layer.window} without heads; a layer without attention has no window"
    if layer.experts and not layer.has_mlp:
        yield f"experts {layer.experts} with mlp_hidden 0; an expert needs at least one hidden unit"
    if layer.experts and not 1 <= layer.experts_per_token <= layer.experts:
        yield (f"experts_per_token {layer.experts_per_token} of {layer.experts} experts; choose from 1 to "
               f"{layer.experts}")  # fmt: skip
    if layer.experts_per_token and not layer.experts:
        yield (f"experts_per_token {layer.experts_per_token} without experts; set experts, or leave both at 0 for a "
               "dense MLP")  # fmt: skip
    if not layer.has_attention:
        if layer.kv_heads:
            yield f"{layer.kv_heads} key/value heads without query heads; a layer without attention has kv_heads 0"
        return
    if layer.kv_heads == 0 or layer.heads % layer.kv_heads:
        yield (f"{layer.kv_heads} key/value heads do not divide {layer.heads} heads; "
               f"near choices: {_near_divisors(layer.heads, max(1, layer.kv_heads))}")  # fmt: skip
    if layer.head_dim == 0:
        yield f"head_dim 0 with {layer.heads} heads; a head needs at least one coordinate"
    elif layer.head_dim % 2 and config.positions == "rotary":
        yield (f"head dim {layer.head_dim} is odd, rotary positions turn pairs of coordinates; choose a head count or "
               "width that makes it even")  # fmt: skip


def _kernel_warnings(layer: LayerShape) -> Iterator[str]:
    for name, size in (("width", layer.width), ("expert size", layer.mlp_hidden)) if layer.experts else ():
        if size % KERNEL_DIM_MULTIPLE:
            yield (f"{name} {size} is no multiple of {KERNEL_DIM_MULTIPLE}: experts are multiplied one after another, "
                   "not in one kernel")  # fmt: skip
    if not layer.has_attention:
        return
    dims = {"head dim": layer.head_dim}
    if layer.value_head_dim != layer.head_dim:
        dims["value dim"] = layer.value_head_dim
    for name, dim in dims.items():
        if dim > KERNEL_DIM_LIMIT:
            yield f"{name} {dim} is above {KERNEL_DIM_LIMIT}: fused attention kernels fall back to a slow one"
        if dim % KERNEL_DIM_MULTIPLE:
            yield f"{name} {dim} is no multiple of {KERNEL_DIM_MULTIPLE}: kernels pad it"
        elif dim & (dim - 1):
            yield f"{name} {dim} is no power of two: kernels may lose alignment"


def divisors(number: int) -> set[int]:
    """All divisors of a positive number."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return {*small, *(number // divisor for divisor in small)}


def _near_divisors(number: int, wanted: int) -> str:
    nearest = sorted(divisors(number), key=lambda divisor: (abs(divisor - wanted), divisor))[:3]
    return ", ".join(map(str, sorted(nearest)))


def _runs(values: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first layer, from 1; length) of each stretch of equal values."""
    first = 1
    for number in range(2, len(values) + 2):
        if number > len(values) or values[number - 1] != values[first - 1]:
            yield first, number - first
            first = number
