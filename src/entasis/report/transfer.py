"""The page of a transfer check: loss against learning rate, one line per width, and where the best rate goes."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import yaml
from markupsafe import Markup
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from entasis.errors import EntasisError
from entasis.report import numbers
from entasis.report.canvas import figure
from entasis.report.ink import Pen
from entasis.report.page import flat_record, render_page, write_page
from entasis.report.scaling_schema import TRANSFER_FORMAT, Transfer, TransferFamily

_VALLEY = 8
"""Losses that are further above the lowest than so many times the median is may leave the frame."""


def write_transfer(results: Transfer, path: Path) -> None:
    """Writes the page to `path`; equal results give equal bytes, and `path` is whole or untouched.

    Raises:
        EntasisError: the results have another format, or the file cannot be written.
    """
    write_page(render_transfer(results), path)


def render_transfer(results: Transfer) -> str:
    """The page as HTML text.

    Raises:
        EntasisError: the results have another format.
    """
    if results.get("format") != TRANSFER_FORMAT:
        raise EntasisError(
            f"results: format {results.get('format')!r} is not {TRANSFER_FORMAT!r}; "
            "write the report with the version of entasis that ran the study"
        )
    families = results["families"]
    return render_page(
        "transfer.html",
        {
            "results": results,
            "figures": {name: rate_figure(number, family) for number, (name, family) in enumerate(families.items())},
            "pens": [Pen(number) for number in range(len(results["widths"]))],
            "number": numbers,
            "config_yaml": yaml.safe_dump(results["config"], sort_keys=False, allow_unicode=True),
            "environment": list(flat_record(results["environment"])),
        },
    )


def rate_figure(number: int, family: TransferFamily) -> Markup:
    """Final loss of one family against the rate: mean and range over seeds of each width, a ring on its best rate."""
    label = "Final held-out loss against learning rate, one line per width"
    with figure(f"transfer-{number}", label) as drawing:
        axes = drawing.axes
        axes.set_xscale("log", base=2)
        edges: list[float] = []
        for index, rung in enumerate(family["rungs"]):
            pen = Pen(index)
            points = [point for point in rung["points"] if point["mean"] is not None]
            seeds = [[loss for loss in point["losses"] if loss is not None] for point in points]
            rates, means = [point["learning_rate"] for point in points], [point["mean"] or 0.0 for point in points]
            low, high = [min(losses) for losses in seeds], [max(losses) for losses in seeds]
            axes.fill_between(rates, low, high, color=pen.sentinel, alpha=0.17, linewidth=0)
            axes.plot(rates, means, color=pen.sentinel, dashes=pen.dashes, marker=pen.marker, markersize=5)
            axes.plot(
                [rung["best"]],
                [min(means)],
                marker="o",
                markersize=12,
                markerfacecolor="none",
                color=pen.sentinel,
                markeredgewidth=1.4,
            )
            diverged = [point["learning_rate"] for point in rung["points"] if point["mean"] is None]
            axes.plot(
                diverged,
                [0.97 - 0.045 * index] * len(diverged),
                color=pen.sentinel,
                linestyle="none",
                marker="x",
                markersize=7,
                markeredgewidth=2,
                transform=axes.get_xaxis_transform(),
            )
            edges += [*low, *means]
        # One rate that all but diverged must not flatten the valley where the choice is made.
        top = min(max(edges), min(edges) + _VALLEY * (median(edges) - min(edges)) or max(edges))
        margin = 0.08 * (top - min(edges)) or 0.05
        axes.set_ylim(min(edges) - margin, top + 2 * margin)
        grid = [point["learning_rate"] for point in family["rungs"][0]["points"]]
        axes.set_xlim(grid[0] / 1.3, grid[-1] * 1.3)
        axes.xaxis.set_major_locator(FixedLocator(grid[:: -(-len(grid) // 6)]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: numbers.rate(value)))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.grid(visible=True, axis="y")
        axes.set_xlabel("learning rate")
        axes.set_ylabel("final held-out loss (nats per token)")
    return drawing.svg
