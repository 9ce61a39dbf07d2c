"""The figures of a comparison with axes: loss curves, difference to the reference, learning rates, forest plot.

Every figure is drawn narrow, at the size that a phone shows, and put beside or below the next one by the page. Names
are never handed to matplotlib (they may hold any character): placeholders are, and become text at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from entasis.report.canvas import figure
from entasis.report.ink import MUTED, Pen
from entasis.report.numbers import NATS_PER_TOKEN, rate
from entasis.report.series import Band, Series, difference_band, loss_band


def loss_figure(shapes: Sequence[Series], total_steps: int, unit: str = NATS_PER_TOKEN) -> Markup:
    """Mean held-out loss over steps with the range over seeds; the steep first tenth may leave the frame."""
    bands = [loss_band(series) for series in shapes]
    with figure("loss", "Held-out loss over training steps, mean and range over seeds") as drawing:
        axes = drawing.axes
        for series, band in zip(shapes, bands, strict=True):
            _draw_band(axes, series.pen, band)
        low = min(min(band.low) for band in bands)
        high = max(max(_from_step(band, band.high, total_steps / 10)) for band in bands)
        margin = 0.05 * (high - low) or 0.05
        axes.set_ylim(low - margin, high + margin)
        axes.set_xlim(0, total_steps)
        axes.set_xlabel("training step")
        axes.set_ylabel(f"held-out loss ({unit})")
        _whole_ticks(axes)
    return drawing.svg


def difference_figure(
    shapes: Sequence[Series], reference: Series, total_steps: int, unit: str = NATS_PER_TOKEN
) -> Markup:
    """Mean paired difference to the reference over steps; the frame fits the second half of training."""
    label = "Held-out loss minus the reference's over training steps, mean and range over seeds"
    with figure("difference", label) as drawing:
        axes = drawing.axes
        axes.axhline(0.0, color=reference.pen.sentinel, linewidth=1.4)
        low = high = 0.0
        for series in shapes:
            band = difference_band(series, reference)
            if not band.steps:
                continue
            _draw_band(axes, series.pen, band)
            low = min(low, *_from_step(band, band.low, total_steps / 2))
            high = max(high, *_from_step(band, band.high, total_steps / 2))
        margin = 0.12 * (high - low) or 1e-3
        axes.set_ylim(low - margin, high + margin)
        axes.set_xlim(0, total_steps)
        axes.set_xlabel("training step")
        axes.set_ylabel(f"difference ({unit})")
        _whole_ticks(axes)
    return drawing.svg


def learning_rate_figure(shapes: Sequence[Series], unit: str = NATS_PER_TOKEN) -> Markup:
    """Final loss of each trial over its learning rate; a ring marks the chosen rate, a cross a trial that diverged."""
    label = "Final held-out loss of each tuning trial over the learning rate"
    tuned = [series for series in shapes if series.result["tuning"]]
    losses = [p["final_val_loss"] for s in tuned for p in s.result["tuning"] if p["final_val_loss"] is not None]
    rates = sorted({point["learning_rate"] for series in tuned for point in series.result["tuning"]})
    with figure("learning-rate", label) as drawing:
        axes = drawing.axes
        axes.set_xscale("log", base=2)
        for series in tuned:
            _draw_trials(axes, series)
        if losses:
            # One trial that all but diverged must not flatten the valley where the choice is made.
            top = min(max(losses), min(losses) + 8 * (median(losses) - min(losses)) or max(losses))
            margin = 0.08 * (top - min(losses)) or 0.05
            axes.set_ylim(min(losses) - margin, top + 2 * margin)
        axes.set_xlim(rates[0] / 1.3, rates[-1] * 1.3)
        stride = -(-len(rates) // 6)
        axes.xaxis.set_major_locator(FixedLocator(rates[::stride]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: rate(value)))
        axes.set_xlabel("learning rate")
        axes.set_ylabel(f"final held-out loss ({unit})")
        axes.yaxis.set_major_locator(MaxNLocator(5))
    return drawing.svg


def _draw_trials(axes: Axes, series: Series) -> None:
    trials = [(point["learning_rate"], point["final_val_loss"]) for point in series.result["tuning"]]
    finished = sorted((x, y) for x, y in trials if y is not None)
    colour, pen = series.pen.sentinel, series.pen
    axes.plot(
        [x for x, _ in finished],
        [y for _, y in finished],
        color=colour,
        dashes=pen.dashes,
        marker=pen.marker,
        markersize=5,
    )
    chosen = [point for point in finished if point[0] == series.result["learning_rate"]]
    for x, y in chosen:
        axes.plot([x], [y], marker="o", markersize=12, markerfacecolor="none", color=colour, markeredgewidth=1.4)
    diverged = [x for x, y in trials if y is None]
    # Heights are shares of the frame; each shape has its own, so that crosses at one rate do not cover each other.
    axes.plot(
        diverged,
        [0.97 - 0.045 * pen.index] * len(diverged),
        color=colour,
        linestyle="none",
        marker="x",
        markersize=7,
        markeredgewidth=2,
        transform=axes.get_xaxis_transform(),
    )


def forest_figure(shapes: Sequence[Series], unit: str = NATS_PER_TOKEN) -> Markup:
    """Each shape's paired difference: interval, mean, single seeds, and the differences that would mostly be missed."""
    rows = [(series, series.result["difference"]) for series in shapes]
    names = {f"shape-placeholder-{number}-": _short(series.name) for number, (series, _) in enumerate(rows)}
    label = "Paired difference of final held-out loss to the reference, with 95 % interval"
    with figure("forest", label, names=names, height=70 + 52 * len(rows)) as drawing:
        axes = drawing.axes
        edges = [0.0]
        for number, (series, difference) in enumerate(rows):
            if difference is None:
                continue
            height, colour = len(rows) - 1 - number, series.pen.sentinel
            hidden = difference["smallest_detectable"]
            if hidden is not None:
                axes.fill_between([-hidden, hidden], height - 0.2, height + 0.2, color=MUTED, alpha=0.16, linewidth=0)
                edges += [-hidden, hidden]
            if difference["low"] is not None and difference["high"] is not None:
                ends = [difference["low"], difference["high"]]
                axes.plot(ends, [height] * 2, color=colour, linewidth=2.4, marker="|", markersize=9, markeredgewidth=2)
                edges += ends
            pairs = difference["pairs"]
            axes.plot(
                pairs,
                [height - 0.3] * len(pairs),
                linestyle="none",
                marker="o",
                markersize=3.4,
                color=colour,
                alpha=0.75,
            )
            axes.plot([difference["mean"]], [height], marker=series.pen.marker, markersize=8, color=colour)
            edges += [*pairs, difference["mean"]]
            axes.text(
                0.0,
                height + 0.31,
                f"shape-placeholder-{number}-",
                transform=axes.get_yaxis_transform(),
                fontweight="bold",
            )
        margin = 0.06 * (max(edges) - min(edges)) or 1e-3
        axes.set_xlim(min(edges) - margin, max(edges) + margin)
        axes.set_ylim(-0.55, len(rows) - 0.3)
        axes.axvline(0.0, color=MUTED, linewidth=1.2, zorder=1.5)
        axes.yaxis.set_major_locator(NullLocator())
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.grid(visible=True, axis="x")
        axes.set_xlabel(f"← lower loss  ·  {unit}  ·  higher loss →")
    return drawing.svg


def _draw_band(axes: Axes, pen: Pen, band: Band) -> None:
    if any(low != high for low, high in zip(band.low, band.high, strict=True)):
        axes.fill_between(band.steps, band.low, band.high, color=pen.sentinel, alpha=0.17, linewidth=0)
    axes.plot(band.steps, band.mean, color=pen.sentinel, dashes=pen.dashes)


def _from_step(band: Band, values: Sequence[float], first: float) -> list[float]:
    """The values from step `first` on; always the last one."""
    kept = [value for step, value in zip(band.steps, values, strict=True) if step >= first]
    return kept or [values[-1]]


def _whole_ticks(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.grid(visible=True, axis="y")


def _short(name: str) -> str:
    return name if len(name) <= 28 else f"{name[:27]}…"
