"""An empty figure to draw in, in the reports' style, which becomes an SVG in theme colours."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from entasis.report.ink import INK, LINE, MUTED, finish

_WIDTH, _HEIGHT = 360, 275  # CSS pixels; a phone shows 358 of them
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 10.5,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "text.color": INK,
    "text.parse_math": False,
}


@dataclass(slots=True)
class Drawing:
    """What is drawn in, and the SVG when it is done."""

    panels: list[Axes]
    """Side by side."""
    svg: Markup

    @property
    def axes(self) -> Axes:
        """The only panel, or the left one."""
        return self.panels[0]


@contextmanager
def figure(
    key: str, label: str, *, names: dict[str, str] | None = None, height: int = _HEIGHT, panels: int = 1
) -> Iterator[Drawing]:
    """An empty figure to draw in; on leaving it holds the SVG. `key` keeps identifiers of several figures apart."""
    with style.context(["default", {**_STYLE, "svg.hashsalt": key}]):  # whatever the user's own matplotlib style says
        made = Figure(figsize=(_WIDTH / 72, height / 72), layout="constrained")
        made.patch.set_visible(False)
        drawing = Drawing([made.add_subplot(1, panels, number) for number in range(1, panels + 1)], Markup())
        for axes in drawing.panels:
            axes.patch.set_visible(False)
            axes.set_axisbelow(True)
            axes.tick_params(length=3)
        yield drawing
        buffer = io.StringIO()
        made.savefig(buffer, format="svg", metadata={"Date": None})
        drawing.svg = finish(buffer.getvalue(), label=label, names=names or {})
