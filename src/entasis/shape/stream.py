"""The residual stream, as far as it is arithmetic: where its width changes, and which coordinates can be non-zero."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from entasis.shape.model_config import ModelConfig
from entasis.shape.records import Shape


@dataclass(frozen=True, slots=True)
class ResizeStep:
    """What happens to the stream's width before one layer, or before the head."""

    before: int
    """Coordinates of the state so far: the previous layer's, at first the embedding's."""
    after: int
    """Coordinates that the layer (the head) reads."""
    written: int
    """Coordinates that embedding or layers have written by then: max(embed_width, w_1 .. w_{l-1})."""

    @property
    def missing(self) -> int:
        """Coordinates that the state so far does not have."""
        return max(0, self.after - self.before)

    @property
    def taken_up(self) -> int:
        """Those of the missing ones that an earlier, wider state wrote."""
        return max(0, min(self.after, self.written) - self.before)


def resize_steps(shape: Shape) -> tuple[ResizeStep, ...]:
    """One step before each layer and one before the head."""
    steps = []
    before = written = shape.embed_width
    for after in (*(layer.width for layer in shape.layers), shape.head_width):
        steps.append(ResizeStep(before, after, written))
        before, written = after, max(written, after)
    return tuple(steps)


def resize_parameters(step: ResizeStep, config: ModelConfig) -> int:
    """Numbers that the configured resize stores for one step."""
    if config.resize == "gated":
        return step.taken_up
    return resize_products(step, config)


def resize_products(step: ResizeStep, config: ModelConfig) -> int:
    """Weights of matrices that the configured resize multiplies a token by in one step."""
    if config.resize == "projection":
        return step.before * step.after if step.before != step.after else 0
    if config.resize == "projection-missing":
        return step.before * step.missing
    return 0


def as_built(shape: Shape, config: ModelConfig) -> Shape:
    """The shape with each layer's width that of the stream it reads and writes.

    The shape itself, but for `resize: constant`: there the stream is `embed_width` wide everywhere, and a layer's width
    is only what its heads and hidden units were derived from.
    """
    if config.resize != "constant":
        return shape
    layers = tuple(dataclasses.replace(layer, width=shape.embed_width) for layer in shape.layers)
    return dataclasses.replace(shape, layers=layers)


def qkv_input_widths(shape: Shape, config: ModelConfig) -> tuple[int, ...]:
    """Input width of the query, key and value projections of each layer, as stored.

    The stream starts with `embed_width` coordinates, the rest zero, and grows as wider layers write. RMSNorm keeps a
    zero a zero, so projections need no column for coordinates that are zero for certain. Where coordinates ride along
    (carry, gated) those are the ones that nothing has written yet: the width is min(w_l, max(embed_width, w_1 ..
    w_{l-1})). Where missing coordinates are zeros, it is min(w_l, w_{l-1}). The other resizes fill every coordinate,
    and LayerNorm moves zeros, so there everything is read.
    """
    layers = as_built(shape, config).layers
    if config.norm != "rmsnorm" or config.resize not in ("carry", "gated", "zero"):
        return tuple(layer.width for layer in layers)
    return tuple(
        min(step.after, step.before if config.resize == "zero" else step.written)
        for step in resize_steps(shape)[: len(layers)]
    )
