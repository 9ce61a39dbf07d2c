"""Matching: scale a shape until a budget equals the reference's.

`matched` works on exact counts of whole shapes, for any family and any budget, and lands on the nearest shape that
there is; what is left is due to rounding. `matched_factor` is the solver of the Variable-Width Transformers (><former),
to the unit: effective counts in real numbers, rounding after. `matched_width` solves the same where no factor below 1
leads from layer to layer: wide middles, constant steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from entasis.errors import ShapeError
from entasis.shape.budget import budget
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import Shape

Match = Literal["effective", "parameters", "flops", "kv"]
"""The budget that is kept equal to the reference's."""

MATCH_FIELDS: dict[str, str] = {
    "effective": "effective_parameters",
    "parameters": "parameters",
    "flops": "flops_per_token",
    "kv": "kv_cache_bytes_per_token",
}
"""The field of a Budget that each match is by."""

_FACTOR_TOLERANCE = 1e-6
"""Relative; the published solver stops here, after at most `_FACTOR_HALVINGS`."""
_FACTOR_HALVINGS = 80
_HALVINGS = 200
_DOUBLINGS_WITHOUT_GROWTH = 8
_CLOSE = 0.01
_AROUND = [0.8 + 0.005 * step for step in range(81)]
"""Factors of the scale that are tried as well where a match is off by more than `_CLOSE`: budgets grow with the scale,
but not everywhere, since few numbers of key/value heads divide, say, 13 heads."""


def matched(build: Callable[[float], Shape], reference: Shape, by: Match, config: ModelConfig) -> Shape:
    """The shape among `build(scale)` whose budget is nearest to the reference's.

    Args:
        build: a shape for a scale above 0, growing (in steps) with the scale.
        reference: what to match.
        by: the budget.
        config: the blocks, and the context at which FLOPs count.

    Raises:
        ShapeError: no scale comes near, since this budget does not grow with it, or since the least shape costs more;
            the line has the numbers.
    """
    field = MATCH_FIELDS[by]

    def cost_of(shape: Shape) -> int:
        return int(getattr(budget(shape, config), field))

    def cost(scale: float) -> int:
        return cost_of(build(scale))

    def gap(shape: Shape) -> int:
        return abs(cost_of(shape) - target)

    target = cost_of(reference)

    if cost(1.0) == target:
        return build(1.0)
    low, high, stayed = 0.0, 1.0, 0
    while cost(high) < target:
        stayed = stayed + 1 if cost(2 * high) == cost(high) else 0
        if stayed == _DOUBLINGS_WITHOUT_GROWTH:
            raise ShapeError(f"match: {by} does not grow with what this family scales: {cost(high):,}, "
                             f"uniform {target:,}; match by another budget")  # fmt: skip
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if cost(middle) < target:
            low = middle
        else:
            high = middle
    if low == 0.0 and cost(high) > target:
        raise ShapeError(f"match: {by} cannot be matched: this shape has at least {cost(high):,}, uniform {target:,}")
    nearest = min((build(scale) for scale in (low, high) if scale > 0), key=gap)
    if gap(nearest) > _CLOSE * target:
        nearest = min((nearest, *(build(high * factor) for factor in _AROUND)), key=gap)
    return nearest


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


def matched_factor(
    cost: WidthCost,
    shares_from: Callable[[float], Sequence[float]],
    *,
    layers: int,
    width: int,
    turn: int,
    ratio: float,
) -> tuple[float, Sequence[float]]:
    """The published solver (><former): halves the factor between layers until layer `turn` is `ratio * width` wide.

    Args:
        cost: weights of a layer.
        shares_from: widths as shares of the first one, from a factor between 0 and 1.
        layers: how many layers of `width` to weigh as much as.
        width: the reference width.
        turn: the narrowest layer, from 1.
        ratio: below 1.

    Returns:
        The first width, in real numbers, and the shares; both to the published tolerance.
    """
    target = cost.effective([1.0] * layers, width)(width)
    low, high = 0.0, 1.0
    for _ in range(_FACTOR_HALVINGS):
        factor = (low + high) / 2
        shares = shares_from(factor)
        first = _reaching(cost.effective(shares, width), target, width)
        narrowest = first * shares[turn - 1]
        if abs(narrowest - ratio * width) <= _FACTOR_TOLERANCE * ratio * width:
            break
        if narrowest < ratio * width:
            low = factor
        else:
            high = factor
    return first, shares


def matched_width(cost: WidthCost, widths_from: Callable[[float], Sequence[float]], layers: int, width: int) -> float:
    """The first width, in real numbers, from which layers of `widths_from(first width)` weigh as much as `layers`
    layers of `width`.

    Raises:
        ShapeError: however narrow the first layer is, the shape weighs more.
    """

    def weights(first: float) -> float:
        return cost.effective(widths_from(first), width)(1.0)

    target = cost.effective([1.0] * layers, width)(width)
    if weights(1.0) > target:
        raise ShapeError(
            "match: effective parameters cannot be matched: the wide part alone outweighs the uniform shape; choose a "
            "milder one"
        )
    return _reaching(weights, target, width)


def _reaching(function: Callable[[float], float], target: float, start: float) -> float:
    """Where a rising function reaches `target`, to the last bit or nearly so."""
    low, high = 0.0, float(start)
    while function(high) < target:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if function(middle) < target:
            low = middle
        else:
            high = middle
    return (low + high) / 2
