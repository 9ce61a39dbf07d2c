"""Rotary positions: queries and keys are turned by angles that grow with the position, half-split.

A head of `head_dim` coordinates is head_dim / 2 pairs; pair i is coordinate i and coordinate i + head_dim / 2, turned
by position / theta^(2 i / head_dim). Angles are computed from whole positions at every forward pass, in float32 or
finer, whatever the precision of the model: in bfloat16 positions above 256 would collide. They are no buffer, so that
no cast can touch them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Rotation(NamedTuple):
    """Cosines and sines of the angles of every position, to be broadcast over heads."""

    cos: Float[Tensor, "#batch time 1 half"]
    sin: Float[Tensor, "#batch time 1 half"]


def rotation(positions: Int[Tensor, "#batch time"], head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """The rotation of heads of `head_dim` coordinates at `positions`.

    Args:
        positions: whole numbers of tokens since the beginning.
        head_dim: even.
        theta: the base of the frequencies.
        dtype: of the model's parameters; computed in it, but at least in float32.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, dtype=dtype, device=positions.device) / head_dim
    # Elementwise on purpose: autocast would run a matrix product in bfloat16.
    angles = positions.to(dtype)[..., None, None] * theta**-exponent
    return Rotation(angles.cos(), angles.sin())


def rotate(x: Float[Tensor, "batch time heads head_dim"], by: Rotation) -> Float[Tensor, "batch time heads head_dim"]:
    """`x` turned; computed and returned in the rotation's dtype."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * by.cos - second * by.sin, second * by.cos + first * by.sin], dim=-1)
