"""The page of a coordinate check: sizes against width, one line per step, and a table of slopes with their verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import yaml
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from entasis.errors import EntasisError
from entasis.report import numbers
from entasis.report.canvas import figure
from entasis.report.ink import Pen
from entasis.report.page import flat_record, render_page, write_page
from entasis.report.scaling_schema import COORDINATES_FORMAT, Coordinates, Quantity, Slope

START, TRAINED = Pen(0), Pen(1)
"""The pens of step 0 and of the steps after it, which grow from pale to full."""
_PALEST = 0.3
_LEAST_RANGE = 4.0
"""Highest / lowest value of a panel's frame, at the least, so that noise does not fill it."""
_NICE = [nice * 10.0**power for power in range(-12, 9) for nice in (1, 2, 5)]


def write_coordinates(results: Coordinates, path: Path) -> None:
    """Writes the page to `path`; equal results give equal bytes, and `path` is whole or untouched.

    Raises:
        EntasisError: the results have another format, or the file cannot be written.
    """
    write_page(render_coordinates(results), path)


def render_coordinates(results: Coordinates) -> str:
    """The page as HTML text.

    Raises:
        EntasisError: the results have another format.
    """
    if results.get("format") != COORDINATES_FORMAT:
        raise EntasisError(
            f"results: format {results.get('format')!r} is not {COORDINATES_FORMAT!r}; "
            "write the report with the version of entasis that ran the check"
        )
    shown = [quantity for quantity in results["quantities"] if quantity["shown"]]
    return render_page(
        "coordinates.html",
        {
            "results": results,
            "figures": [(quantity, size_figure(quantity, results["steps"])) for quantity in shown],
            "start": START,
            "trained": TRAINED,
            "slope": slope_words,
            "interval": slope_interval,
            "number": numbers,
            "config_yaml": yaml.safe_dump(results["config"], sort_keys=False, allow_unicode=True),
            "environment": list(flat_record(results["environment"])),
        },
    )


def slope_words(slope: Slope, tolerance: float) -> str:
    """A slope with its verdict: `+0.02, flat within ±0.1`."""
    verdict = f"flat within ±{tolerance:g}" if slope["verdict"] == "flat" else slope["verdict"]
    return verdict if slope["mean"] is None else f"{numbers.signed(slope['mean'])}, {verdict}"


def slope_interval(slope: Slope) -> str:
    """The slope's interval, or a dash."""
    if slope["low"] is None or slope["high"] is None:
        return "–"
    return f"{numbers.signed(slope['low'])} to {numbers.signed(slope['high'])}"


def size_figure(quantity: Quantity, steps: int) -> Markup:
    """Size (left) and change since the start (right) of one quantity against its width, one line per step."""
    label = f"{quantity['name']}: size and change against width, one line per step"
    with figure(f"coordinates-{quantity['kind']}-{quantity['layer']}", label, height=210, panels=2) as drawing:
        size, change = drawing.panels
        _draw_steps(size, quantity["widths"], quantity["sizes"], first=0, steps=steps)
        _draw_steps(change, quantity["widths"], quantity["changes"], first=1, steps=steps)
        size.set_title("size", fontsize=10.5, loc="left")
        change.set_title("change", fontsize=10.5, loc="left")
    return drawing.svg


def _draw_steps(
    axes: Axes, widths: Sequence[int], values: Sequence[Sequence[Sequence[float]]], *, first: int, steps: int
) -> None:
    """Lines of means over seeds; the last step has its range over seeds."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    drawn: list[float] = []
    for step in range(first, steps + 1):
        columns = [[seed[step - first] for seed in rung] for rung in values]
        if any(not value > 0 for column in columns for value in column):
            continue  # what is zero has no place on a logarithmic axis
        pen = TRAINED if step else START
        strength = _PALEST + (1 - _PALEST) * step / steps if step else 1.0
        means = [math.fsum(column) / len(column) for column in columns]
        axes.plot(widths, means, color=pen.sentinel, alpha=strength, marker="o", markersize=3.5, zorder=2 + step / 100)
        if step == steps:
            lowest, highest = [min(column) for column in columns], [max(column) for column in columns]
            axes.fill_between(widths, lowest, highest, color=pen.sentinel, alpha=0.17, linewidth=0)
            drawn += lowest + highest
        drawn += means
    axes.grid(visible=True, axis="y")
    axes.set_xlim(min(widths) / 1.12, max(widths) * 1.12)
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(widths))))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("width")
    if not drawn:
        axes.yaxis.set_major_locator(NullLocator())
        axes.text(0.5, 0.5, "zero", transform=axes.transAxes, ha="center")
        return
    spread = max(1.2, math.sqrt(_LEAST_RANGE / (max(drawn) / min(drawn))))
    low, high = min(drawn) / spread, max(drawn) * spread
    axes.set_ylim(low, high)
    ticks = [nice for nice in _NICE if low <= nice <= high]
    axes.yaxis.set_major_locator(FixedLocator(ticks[:: -(-len(ticks) // 6)] if ticks else []))
