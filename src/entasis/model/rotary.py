"""Rotary positions: queries and keys are turned by angles that grow with the position, half-split.

A head of `head_dim` coordinates is head_dim / 2 pairs; pair i is coordinate i and coordinate i + head_dim / 2, turned
by position x frequency, where the frequency of pair i is theta^(-2 i / head_dim), or what rotary scaling makes of it.
Angles are computed from whole positions at every forward pass, in float32 or finer, whatever the precision of the
model: in bfloat16 positions above 256 would collide. They are no buffer, so that no cast can touch them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from entasis.shape.rotary_scaling import RotaryScaling

Frequencies = Float[Tensor, " half"]


class Rotation(NamedTuple):
    """Cosines and sines of the angles of every position, to be broadcast over heads."""

    cos: Float[Tensor, "#batch time 1 half"]
    sin: Float[Tensor, "#batch time 1 half"]


def rotation(
    positions: Int[Tensor, "#batch time"],
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: RotaryScaling | None = None,
) -> Rotation:
    """The rotation of heads of `head_dim` coordinates at `positions`.

    Args:
        positions: whole numbers of tokens since the beginning.
        head_dim: even.
        theta: the base of the frequencies.
        dtype: of the model's parameters; computed in it, but at least in float32.
        scaling: how positions are stretched; None: not at all.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, dtype=dtype, device=positions.device) / head_dim
    frequencies = theta**-exponent
    if scaling is not None:
        frequencies = scaled(frequencies, head_dim, theta, scaling)
    # Elementwise on purpose: autocast would run a matrix product in bfloat16.
    angles = positions.to(dtype)[..., None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    if scaling is not None and scaling.temperature is not None:
        cos, sin = cos * scaling.temperature, sin * scaling.temperature
    return Rotation(cos, sin)


def scaled(frequencies: Frequencies, head_dim: int, theta: float, scaling: RotaryScaling) -> Frequencies:
    """The frequencies of heads of `head_dim` coordinates after rotary scaling."""
    slowed = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slowed
    if scaling.kind == "ntk":
        return _with_another_base(frequencies, head_dim, scaling.factor)
    if scaling.kind == "yarn":
        share = _yarn_share(frequencies, head_dim, theta, scaling)
    else:
        share = _llama3_share(frequencies, scaling)
    return share * frequencies + (1 - share) * slowed


def rotate(x: Float[Tensor, "batch time heads head_dim"], by: Rotation) -> Float[Tensor, "batch time heads head_dim"]:
    """`x` turned; computed and returned in the rotation's dtype."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * by.cos - second * by.sin, second * by.cos + first * by.sin], dim=-1)


def _with_another_base(frequencies: Frequencies, head_dim: int, factor: float) -> Frequencies:
    """A base of theta factor^(head_dim / (head_dim - 2)): the last pair is slowed by the whole factor."""
    if head_dim == 2:
        return frequencies  # its one pair is the first, which keeps its frequency of 1
    pair = torch.arange(head_dim // 2, dtype=frequencies.dtype, device=frequencies.device)
    return frequencies * factor ** (-pair / (head_dim // 2 - 1))


def _yarn_share(frequencies: Frequencies, head_dim: int, theta: float, scaling: RotaryScaling) -> Frequencies:
    """Of each pair, the share that keeps its frequency: 1 up to the pair that turns `beta_fast` times within the
    original context, 0 from the one that turns `beta_slow` times; on a line over the pairs between."""
    context, fast, slow = scaling.original_context, scaling.beta_fast, scaling.beta_slow
    assert context and fast and slow

    def pair_with(turns: float) -> float:
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_with(fast)), 0)
    last = min(math.ceil(pair_with(slow)), head_dim - 1)
    pair = torch.arange(head_dim // 2, dtype=frequencies.dtype, device=frequencies.device)
    return 1 - ((pair - first) / (last - first or 0.001)).clamp(0, 1)


def _llama3_share(frequencies: Frequencies, scaling: RotaryScaling) -> Frequencies:
    """Of each pair, the share that keeps its frequency: 0 up to `low_frequency` turns within the original context, 1
    from `high_frequency`; on a line over the turns between."""
    context, low, high = scaling.original_context, scaling.low_frequency, scaling.high_frequency
    assert context and low and high
    turns = context * frequencies / (2 * math.pi)
    return ((turns - low) / (high - low)).clamp(0, 1)
