"""One shape as a series of a figure, and its held-out curves gathered over seeds for drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from entasis.report.ink import Pen
from entasis.report.schema import CurvePoint, ShapeResult


@dataclass(frozen=True, slots=True)
class Series:
    """One shape with its name and the pen that draws it."""

    name: str
    pen: Pen
    result: ShapeResult

    @property
    def curves(self) -> list[list[CurvePoint]]:
        """The held-out curve of each seed."""
        return [run["curve"] for run in self.result["runs"]]


@dataclass(frozen=True, slots=True)
class Band:
    """Values over steps: their mean over seeds, the lowest and the highest."""

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


def loss_band(series: Series) -> Band:
    """Held-out loss of one shape over its seeds, at the steps that all of them share."""
    return _band([{point["step"]: point["val_loss"] for point in curve} for curve in series.curves])


def difference_band(series: Series, reference: Series) -> Band:
    """Held-out loss minus the reference's with the same seed, over the seeds that both have."""
    others = {run["seed"]: run["curve"] for run in reference.result["runs"]}
    rows = []
    for run in series.result["runs"]:
        other = {point["step"]: point["val_loss"] for point in others.get(run["seed"], [])}
        row = {p["step"]: p["val_loss"] - other[p["step"]] for p in run["curve"] if p["step"] in other}
        if row:
            rows.append(row)
    return _band(rows)


def _band(rows: Sequence[dict[int, float]]) -> Band:
    steps = sorted(set(rows[0]).intersection(*rows)) if rows else []
    columns = [[row[step] for row in rows] for step in steps]
    return Band(steps, [sum(c) / len(c) for c in columns], [min(c) for c in columns], [max(c) for c in columns])
