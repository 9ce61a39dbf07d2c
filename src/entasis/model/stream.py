"""The carried residual stream: a prefix that the current layer reads and writes, and the coordinates that ride along.

Narrowing sets coordinates aside, widening takes them up again by concatenation. Nothing is written in place, so that
autograd needs no copies. Coordinates that neither embedding nor layer has written yet are not held: they are zero, and
are made when a layer or the head asks for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """The residual stream of a batch of sequences."""

    prefix: Float[Tensor, "batch time width"]
    """The coordinates [0, width) of the current layer."""
    carried: tuple[Float[Tensor, "batch time rest"], ...] = ()
    """The written coordinates from `width` on, in ascending order, in pieces as they were set aside."""

    @property
    def width(self) -> int:
        """Width of the prefix."""
        return self.prefix.shape[-1]

    def resized(self, width: int) -> ResidualStream:
        """The same stream with a prefix of `width` coordinates."""
        if width < self.width:
            # A piece is contiguous so that it does not keep the wide state alive that it was cut from.
            rest = self.prefix[..., width:].contiguous()
            return ResidualStream(self.prefix[..., :width], (rest, *self.carried))
        if width == self.width:
            return self
        pieces, carried = [self.prefix], list(self.carried)
        missing = width - self.width
        while missing and carried:
            piece = carried.pop(0)
            if piece.shape[-1] > missing:
                carried.insert(0, piece[..., missing:])
                piece = piece[..., :missing]
            pieces.append(piece)
            missing -= piece.shape[-1]
        prefix = torch.cat(pieces, dim=-1) if len(pieces) > 1 else self.prefix
        return ResidualStream(functional.pad(prefix, (0, missing)) if missing else prefix, tuple(carried))

    def updated(self, prefix: Float[Tensor, "batch time width"]) -> ResidualStream:
        """The same stream with another state of the prefix."""
        return ResidualStream(prefix, self.carried)
