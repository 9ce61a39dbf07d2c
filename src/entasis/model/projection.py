"""The two ways in which a stored matrix acts: multiplied by (Projection) and looked up (Embedding).

Unlike torch's own layers they draw no random numbers when they are made: `entasis.model.init` alone says how a model
starts, and building one leaves the global random state as it was.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional


class Projection(nn.Module):
    """x -> x weight^T (+ bias). The weight is stored as (out, in)."""

    def __init__(self, in_width: int, out_width: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_width, in_width))
        self.bias = nn.Parameter(torch.empty(out_width)) if bias else None

    @property
    def in_width(self) -> int:
        """Coordinates that the projection reads."""
        return self.weight.shape[1]

    def forward(self, x: Float[Tensor, "batch time in"]) -> Float[Tensor, "batch time out"]:
        """The projected state."""
        return functional.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """One row of `width` coordinates per id."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape width"]:
        """The rows of `ids`."""
        return functional.embedding(ids, self.weight)
