"""Matching: scale a profile of widths until a budget equals the reference's, then round.

The rule is that of the Variable-Width Transformers (><former), with counts taken for any block: what is matched is the
effective count, which leaves out the query, key and value inputs of a wide first layer and the outputs of the last
down-projection beyond the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from entasis.errors import ShapeError
from entasis.shape.profiles import geometric

_FACTOR_TOLERANCE = 1e-6
"""Relative; the published solver stops here, after at most `_FACTOR_HALVINGS`."""
_FACTOR_HALVINGS = 80


@dataclass(frozen=True, slots=True)
class WidthCost:
    """Weights of one layer as a function of its width w: `square * w^2 + line * w`, and of the two wastes.

    For every coordinate of an end's width w beyond the reference width, a waste is `square * w` weights, the last one
    `fixed` more.
    """

    square: float
    line: float
    first_waste_square: float
    last_waste_square: float
    last_waste_fixed: float

    def effective(self, shares: Sequence[float], reference_width: float) -> Callable[[float], float]:
        """Effective weights of layers of `shares` of a (real-valued) width, as a function of that width.

        The tables at both ends are `reference_width` wide.
        """
        squares = self.square * sum(share * share for share in shares)
        lines = self.line * sum(shares)

        def weights(width: float) -> float:
            first, last = shares[0] * width, shares[-1] * width
            return (
                squares * width * width
                + lines * width
                - max(0.0, first - reference_width) * self.first_waste_square * first
                - max(0.0, last - reference_width) * (self.last_waste_square * last + self.last_waste_fixed)
            )

        return weights


def bowtie_widths(
    cost: WidthCost, *, layers: int, width: int, bottleneck: float, turn: int, multiple: int
) -> list[int]:
    """Widths of a bowtie: geometric down to layer `turn` (from 1), and back up to the first width.

    The narrowest layer is `bottleneck * width` wide and the effective weights equal those of `layers` layers of
    `width`, both before rounding. The first width is rounded to a whole number, the chain multiplied out from it, and
    each width rounded to `multiple` (ties to even) only then, so that the match is approximate after rounding. A
    bottleneck of 1 is the straight column, unrounded.

    Raises:
        ShapeError: no such bowtie exists.
    """
    if bottleneck == 1.0:
        return [width] * layers

    def first_width(factor: float) -> float:
        return _matched_scale(cost, geometric(layers, factor, turn), width)

    def narrowest(factor: float) -> float:
        return first_width(factor) * factor ** (turn - 1)

    target = bottleneck * width
    factor = _bisect(narrowest, target, low=0.0, high=1.0)
    first = round(first_width(factor))
    widths = [round(first * share / multiple) * multiple for share in geometric(layers, factor, turn)]
    if min(widths) == 0:
        raise ShapeError(
            f"bottleneck: {bottleneck} of width {width} is {target:.1f}, which rounds to 0 at multiple {multiple}; "
            "raise bottleneck or lower multiple"
        )
    return widths


def _matched_scale(cost: WidthCost, shares: Sequence[float], reference_width: int) -> float:
    """The first width at which layers of `shares` of it weigh as much as equal layers of `reference_width`."""
    target = cost.effective([1.0] * len(shares), reference_width)(reference_width)
    weights = cost.effective(shares, reference_width)
    high = float(reference_width)
    while weights(high) < target:
        high *= 2
    low = high / 2 if high > reference_width else 0.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if weights(middle) < target:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _bisect(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where the rising `function` reaches `target`, to the published solver's tolerance."""
    for _ in range(_FACTOR_HALVINGS):
        middle = (low + high) / 2
        value = function(middle)
        if abs(value - target) <= _FACTOR_TOLERANCE * target:
            break
        if value < target:
            low = middle
        else:
            high = middle
    return middle
