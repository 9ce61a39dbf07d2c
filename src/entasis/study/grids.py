"""What a grid of learning rates says of a rung, and what the best rate does from one rung to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from entasis.errors import EntasisError
from entasis.report.numbers import interval, nats, rate
from entasis.report.scaling_schema import GridPoint, Move, Rung, TunedRung
from entasis.study.statistics import mean, paired_difference

Losses = Mapping[float, Sequence[float | None]]
"""Final losses of each rate, one per seed; None: the run diverged."""


def tuned_rung(name: str, rung: Rung, losses: Losses, tokens_per_parameter: float) -> TunedRung:
    """The grid of one rung, its best rate, and which rates are not shown to be worse.

    The best rate is that of the lowest mean over seeds, of those at which no seed diverged.

    Raises:
        EntasisError: a seed diverged at every rate.
    """
    rates = sorted(losses)
    finite = {value: each for value in rates if (each := _finite(losses[value])) is not None}
    if not finite:
        raise EntasisError(f"transfer: {name} at width {rung['width']} diverged at every rate; try lower ones")
    best = min(finite, key=lambda value: mean(finite[value]))
    points = [
        GridPoint(
            learning_rate=value,
            losses=list(losses[value]),
            mean=mean(finite[value]) if value in finite else None,
            not_worse=value in finite and paired_difference(finite[value], finite[best])["verdict"] != "higher",
        )
        for value in rates
    ]
    return TunedRung(
        rung=rung,
        tokens_per_parameter=tokens_per_parameter,
        points=points,
        best=best,
        best_by_seed=[_best_of_seed(losses, seed) for seed in range(len(losses[best]))],
        at_edge=best in (rates[0], rates[-1]),
    )


def move(name: str, smaller: TunedRung, larger: TunedRung) -> Move:
    """From one rung's best rate to the next one's, with the cost of keeping the smaller rung's."""
    rates = [point["learning_rate"] for point in larger["points"]]
    kept = larger["points"][rates.index(smaller["best"])]["losses"]
    own = larger["points"][rates.index(larger["best"])]["losses"]
    pairs = [None if a is None or b is None else a - b for a, b in zip(kept, own, strict=True)]
    result = Move(
        from_width=smaller["rung"]["width"],
        to_width=larger["rung"]["width"],
        steps=rates.index(larger["best"]) - rates.index(smaller["best"]),
        steps_by_seed=[
            rates.index(after) - rates.index(before)
            for before, after in zip(smaller["best_by_seed"], larger["best_by_seed"], strict=True)
        ],
        pairs=pairs,
        cost=None,
        low=None,
        high=None,
        verdict="diverged",
        sentence="",
    )
    finite_kept, finite_own = _finite(kept), _finite(own)
    if finite_kept is not None and finite_own is not None:
        difference = paired_difference(finite_kept, finite_own)
        result["cost"], result["low"], result["high"] = difference["mean"], difference["low"], difference["high"]
        result["verdict"] = (
            "same rate"
            if result["steps"] == 0
            else "one seed"
            if len(pairs) == 1
            else "moved"
            if difference["verdict"] == "higher"
            else "moved, no cost shown"
        )
        if smaller["at_edge"] or larger["at_edge"]:
            result["verdict"] = "edge of the grid"
    result["sentence"] = _sentence(name, smaller, larger, result)
    return result


def _sentence(name: str, smaller: TunedRung, larger: TunedRung, found: Move) -> str:
    """The move in plain words, with the numbers."""
    before, after, steps = found["from_width"], found["to_width"], found["steps"]
    text = f"{name}, width {before} to {after}: "
    if steps == 0:
        seeds = found["steps_by_seed"]
        text += f"the best rate stays {rate(larger['best'])}"
        text += (
            f"; so it does with {seeds.count(0)} of {len(seeds)} seeds alone." if len(seeds) > 1 else ", with one seed."
        )
    else:
        way = f"{abs(steps)} grid step{'s' if abs(steps) > 1 else ''} {'up' if steps > 0 else 'down'}"
        text += f"the best rate moves from {rate(smaller['best'])} to {rate(larger['best'])}, {way}; "
        if found["cost"] is None:
            text += f"at the rate of width {before}, width {after} diverges."
        else:
            text += f"the rate of width {before} costs {nats(found['cost'])} nats per token at width {after}"
            if found["low"] is None or found["high"] is None:
                text += " (no interval)."
            elif found["low"] <= 0:
                text += f", not shown: the 95 % interval, {interval(found['low'], found['high'])}, contains zero."
            else:
                text += f" (95 % interval {interval(found['low'], found['high'])})."
    edges = [each["rung"]["width"] for each in (smaller, larger) if each["at_edge"]]
    if edges:
        text += (
            f" At width {' and '.join(map(str, edges))} the best rate is at the edge of the grid and may lie outside: "
            "transfer is not shown."
        )
    return text


def _finite(losses: Sequence[float | None]) -> list[float] | None:
    """The losses, if no seed diverged."""
    kept = [loss for loss in losses if loss is not None]
    return kept if len(kept) == len(losses) else None


def _best_of_seed(losses: Losses, seed: int) -> float:
    found = [(loss, value) for value, each in losses.items() if (loss := each[seed]) is not None]
    return min(found)[1]
