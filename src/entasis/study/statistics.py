"""What a comparison may say: paired differences with their interval, the power of the design, and reached losses.

Losses are nats per token. Every function refuses numbers that are not finite, so that a broken run cannot become a
verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy import optimize, stats

from entasis.errors import EntasisError
from entasis.report.numbers import NATS_PER_TOKEN, interval, nats
from entasis.report.schema import CurvePoint, Difference, Reach

CONFIDENCE = 0.95
POWER = 0.80
_EPSILON = 2.0**-52


def mean(values: Sequence[float]) -> float:
    """The mean, summed exactly.

    Raises:
        EntasisError: there is no value, or one is not finite.
    """
    _require_finite("mean", values)
    return math.fsum(values) / len(values)


def sample_sd(values: Sequence[float]) -> float | None:
    """The sample standard deviation (n - 1); None of a single value.

    Raises:
        EntasisError: there is no value, or one is not finite.
    """
    centre = mean(values)
    if len(values) < 2:
        return None
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def mean_curve(curves: Sequence[Sequence[CurvePoint]]) -> list[CurvePoint]:
    """The mean over seeds of held-out curves that were evaluated at the same steps.

    Raises:
        EntasisError: no curve, a loss that is not finite, or curves whose steps differ.
    """
    if not curves:
        raise EntasisError("mean curve: there is no curve to average")
    steps = [point["step"] for point in curves[0]]
    for number, curve in enumerate(curves[1:], start=2):
        if [point["step"] for point in curve] != steps:
            raise EntasisError(
                f"mean curve: curve {number} was evaluated at other steps than curve 1; "
                "train all seeds with one evaluate_every"
            )
    return [
        CurvePoint(
            step=points[0]["step"], tokens=points[0]["tokens"], val_loss=mean([point["val_loss"] for point in points])
        )
        for points in zip(*curves, strict=True)
    ]


def reach(
    curve: Sequence[CurvePoint], target: float, *, total_steps: int, flops_per_step: float, reference_flops: float
) -> Reach:
    """When `curve` (a mean curve) first is at or below `target`, linear in steps between two evaluations.

    `flops_per_step` is this shape's cost of one training step, `reference_flops` what the reference's whole run cost.
    A curve that starts at or below the target has reached it at its first evaluation. Where it never gets there, all
    fields are None.

    Raises:
        EntasisError: no point, steps that do not rise, a number that is not finite, a total that is not positive.
    """
    _require_finite("reach", [target, flops_per_step, reference_flops, *(point["val_loss"] for point in curve)])
    if total_steps <= 0 or reference_flops <= 0:
        raise EntasisError(f"reach: totals must be positive, got {total_steps} steps and {reference_flops:g} FLOPs")
    steps = _first_crossing(curve, target)
    if steps is None:
        return Reach(steps=None, flops=None, steps_ratio=None, flops_ratio=None)
    flops = steps * flops_per_step
    return Reach(steps=steps, flops=flops, steps_ratio=steps / total_steps, flops_ratio=flops / reference_flops)


def _first_crossing(curve: Sequence[CurvePoint], target: float) -> float | None:
    if not curve:
        raise EntasisError("reach: the curve has no evaluation")
    previous: CurvePoint | None = None
    for point in curve:
        if previous is not None and point["step"] <= previous["step"]:
            raise EntasisError(f"reach: step {point['step']} follows step {previous['step']}; steps must rise")
        if point["val_loss"] <= target:
            if previous is None:
                return float(point["step"])
            share = (previous["val_loss"] - target) / (previous["val_loss"] - point["val_loss"])
            return previous["step"] + share * (point["step"] - previous["step"])
        previous = point
    return None


def smallest_detectable(sd: float, pairs: int) -> float:
    """The true difference that a two-sided paired t-test at 5 % shows with 80 % power, for pairs with this sd.

    Exact (noncentral t): with few seeds the normal approximation promises far too much.

    Raises:
        EntasisError: fewer than two pairs, or an sd that is negative or not finite.
    """
    if pairs < 2 or not math.isfinite(sd) or sd < 0:
        raise EntasisError(f"power: needs at least 2 pairs and a finite sd, got {pairs} pairs and sd {sd}")
    upper = 1.0
    while _power(upper, pairs) < POWER:
        upper *= 2
    noncentrality = float(optimize.brentq(lambda value: _power(value, pairs) - POWER, 0.0, upper))
    return noncentrality * sd / math.sqrt(pairs)


def _power(noncentrality: float, pairs: int) -> float:
    critical = stats.t.ppf((1 + CONFIDENCE) / 2, pairs - 1)
    # The far tail is written as a mirrored upper tail: scipy's lower tail is nan at some large noncentralities.
    right, left = (stats.nct.sf(critical, pairs - 1, side * noncentrality) for side in (1.0, -1.0))
    return float(right + left)


def paired_difference(
    values: Sequence[float],
    reference: Sequence[float],
    *,
    name: str = "this shape",
    reference_name: str = "the reference",
    unit: str = NATS_PER_TOKEN,
) -> Difference:
    """Final losses of a shape minus the reference's, paired by position (seed): interval, power, verdict.

    The interval is the paired t interval at 95 %. It is None with one seed, and also where several seeds give one and
    the same non-zero difference: then there is no spread to estimate it from. `name`, `reference_name` and
    `unit` stand in the sentence.

    Raises:
        EntasisError: no pair, lists of different length, or a loss that is not finite.
    """
    if len(values) != len(reference):
        raise EntasisError(f"paired difference: {len(values)} losses of {name} against {len(reference)} of the other")
    _require_finite(f"paired difference, {name}", values)
    _require_finite(f"paired difference, {reference_name}", reference)
    pairs = [value - other for value, other in zip(values, reference, strict=True)]
    count, centre, sd = len(pairs), mean(pairs), sample_sd(pairs)
    result = Difference(
        pairs=pairs,
        mean=centre,
        low=None,
        high=None,
        p_value=None,
        smallest_detectable=None,
        verdict="no difference shown",
        sentence="",
    )
    # Subtracting two losses leaves rounding noise; a spread of that size is no spread.
    rounding = 8 * _EPSILON * max(map(abs, [*values, *reference]))
    if not any(pairs):
        result["verdict"] = "identical"
        if count > 1:
            result["low"] = result["high"] = 0.0
    elif sd is None:
        result["verdict"] = "one seed"
    elif sd > rounding:
        error = sd / math.sqrt(count)
        margin = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error
        result["low"], result["high"] = low, high = centre - margin, centre + margin
        result["p_value"] = float(2 * stats.t.sf(abs(centre) / error, count - 1))
        result["smallest_detectable"] = smallest_detectable(sd, count)
        result["verdict"] = "lower" if high < 0 else "higher" if low > 0 else "no difference shown"
    result["sentence"] = verdict_sentence(result, name, reference_name, unit)
    return result


def verdict_sentence(difference: Difference, name: str, reference_name: str, unit: str = NATS_PER_TOKEN) -> str:
    """The verdict in plain words, with direction, numbers and unit."""
    seeds = len(difference["pairs"])
    direction = "below" if difference["mean"] < 0 else "above"
    finding = f"{name} ends {nats(abs(difference['mean']))} {unit} {direction} {reference_name}"
    if difference["mean"] == 0:
        finding = f"{name} ends at the loss of {reference_name}"
    low, high, power = difference["low"], difference["high"], difference["smallest_detectable"]
    match difference["verdict"]:
        case "identical":
            return f"Identical: {name} and {reference_name} end at exactly the same loss with every seed."
        case "one seed":
            return f"One seed: {finding}. With a single seed there is no interval, so no difference is shown."
    if low is None or high is None or power is None:
        return (
            f"No difference shown: {finding} with each of {seeds} seeds. Without any spread between the seeds there "
            "is no interval; check that the seeds are independent runs."
        )
    design = (
        f"with the spread of these pairs, {seeds} paired seeds could have shown a difference of {nats(power)} "
        "with 80 % power"
    )
    if difference["verdict"] == "no difference shown":
        return (
            f"No difference shown: the 95 % interval, {interval(low, high)} {unit}, contains zero. "
            f"On average {finding}; {design}."
        )
    return f"{difference['verdict'].capitalize()} loss: {finding} (95 % interval {interval(low, high)}); {design}."


def _require_finite(what: str, values: Sequence[float]) -> None:
    if not values:
        raise EntasisError(f"{what}: there is no value")
    for number, value in enumerate(values, start=1):
        if not math.isfinite(value):
            raise EntasisError(f"{what}: value {number} of {len(values)} is {value}; only finite losses are compared")
