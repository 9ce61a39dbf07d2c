"""What stands in for the carried stream in the resize ablations: another state wherever the width changes.

A model that carries (the default) uses `entasis.model.stream.ResidualStream` alone and nothing of this module. Every
other method is a list of modules, one before each layer and one before the head, of which each takes the stream so far
and gives the stream with another prefix. `Resizes.stream` wraps the two into what the network's loop asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from entasis.model.projection import Projection
from entasis.model.stream import ResidualStream
from entasis.shape.model_config import ModelConfig
from entasis.shape.model_config import Resize as Method
from entasis.shape.records import Shape
from entasis.shape.stream import ResizeStep, resize_steps


class Stream(Protocol):
    """What the network's loop needs: a prefix to read, another width, another state."""

    @property
    def prefix(self) -> Float[Tensor, "batch time width"]:
        """The coordinates [0, width) of the current layer."""

    def resized(self, width: int) -> Self:
        """The stream with a prefix of `width` coordinates."""

    def updated(self, prefix: Float[Tensor, "batch time width"]) -> Self:
        """The stream with another state of the prefix."""


Resize = Callable[[ResidualStream, int], ResidualStream]
"""One step: the stream so far and the wanted width -> the stream with a prefix of that width."""


@dataclass(frozen=True, slots=True)
class ResizedStream:
    """A stream whose widths are joined by `steps`, the next one first."""

    steps: Sequence[Resize]
    stream: ResidualStream

    @property
    def prefix(self) -> Float[Tensor, "batch time width"]:
        """The coordinates [0, width) of the current layer."""
        return self.stream.prefix

    def resized(self, width: int) -> ResizedStream:
        """The stream after the next step."""
        return ResizedStream(self.steps[1:], self.steps[0](self.stream, width))

    def updated(self, prefix: Float[Tensor, "batch time width"]) -> ResizedStream:
        """The same stream with another state of the prefix."""
        return ResizedStream(self.steps, self.stream.updated(prefix))


class Resizes(nn.ModuleList):
    """The steps of one method through a shape: number l before layer l (from 0), the last before the head."""

    def stream(self, state: Float[Tensor, "batch time embed"]) -> ResizedStream:
        """The stream that begins with `state`."""
        return ResizedStream(tuple(cast(Resize, step) for step in self), ResidualStream(state))


def resizes(shape: Shape, config: ModelConfig) -> Resizes | None:
    """The steps that `config.resize` wants; None where coordinates are carried (or the width never changes)."""
    if config.resize not in _STEPS:
        return None
    steps = [_STEPS[config.resize](step) for step in resize_steps(shape)]
    if config.resize == "zero":
        # The published code fills what the head reads by carrying, even under this method.
        steps[-1] = _Carried()
    return Resizes(steps)


class _Carried(nn.Module):
    """Narrower: coordinates are set aside. Wider: they are taken up again."""

    def forward(self, stream: ResidualStream, width: int) -> ResidualStream:
        return stream.resized(width)


class _Zeros(nn.Module):
    """Missing coordinates are zeros. What is set aside is held for the head alone."""

    def forward(self, stream: ResidualStream, width: int) -> ResidualStream:
        carried = stream.resized(width)
        if width <= stream.width:
            return carried
        return carried.updated(functional.pad(stream.prefix, (0, width - stream.width)))


class _Projected(nn.Module):
    """A learned matrix from the old width to the new one replaces the state; nothing is carried."""

    def __init__(self, step: ResizeStep) -> None:
        super().__init__()
        self.projection = Projection(step.before, step.after, bias=False) if step.before != step.after else None

    def forward(self, stream: ResidualStream, width: int) -> ResidualStream:
        if self.projection is None:
            return stream
        # Under autocast the product is rounded; the stream stays in its own dtype.
        return ResidualStream(self.projection(stream.prefix).to(stream.prefix.dtype))


class _Completed(nn.Module):
    """Narrower: cut. Wider: a learned matrix makes the missing coordinates from those that are there."""

    def __init__(self, step: ResizeStep) -> None:
        super().__init__()
        self.projection = Projection(step.before, step.missing, bias=False) if step.missing else None

    def forward(self, stream: ResidualStream, width: int) -> ResidualStream:
        if self.projection is None:
            return ResidualStream(stream.prefix[..., :width])
        made = self.projection(stream.prefix).to(stream.prefix.dtype)
        return ResidualStream(torch.cat([stream.prefix, made], dim=-1))


class _Gated(nn.Module):
    """Carried, but each coordinate that is taken up is multiplied by the sigmoid of a learned number."""

    def __init__(self, step: ResizeStep) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(step.taken_up)) if step.taken_up else None

    def forward(self, stream: ResidualStream, width: int) -> ResidualStream:
        carried = stream.resized(width)
        if self.gate is None:
            return carried
        kept, taken_up, unwritten = carried.prefix.tensor_split(
            (stream.width, stream.width + self.gate.shape[0]), dim=-1
        )
        return carried.updated(torch.cat([kept, taken_up * self.gate.sigmoid(), unwritten], dim=-1))


class _Interpolated(nn.Module):
    """The state is read as a curve over its coordinates and sampled at another number of them, ends on ends."""

    def forward(self, stream: ResidualStream, width: int) -> ResidualStream:
        if width == stream.width:
            return stream
        return ResidualStream(functional.interpolate(stream.prefix, size=width, mode="linear", align_corners=True))


_STEPS: dict[Method, Callable[[ResizeStep], nn.Module]] = {
    "zero": lambda _: _Zeros(),
    "projection": _Projected,
    "projection-missing": _Completed,
    "gated": _Gated,
    "interpolation": lambda _: _Interpolated(),
}
"""The step of each method that needs one; `carry` is the stream itself, under `constant` no width changes."""
