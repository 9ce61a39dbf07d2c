"""Colours of a report: figures are drawn in sentinel colours that become CSS variables, so one file has two themes.

Each shape has one hue; the reference comes first and is neutral. The hues keep a contrast
of at least 3 to the page and stay apart under the common colour-vision deficiencies; dashes and markers say the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from markupsafe import Markup, escape

# (light theme, dark theme)
_SERIES = (
    ("#3d4552", "#b4bac4"),
    ("#1b50c0", "#3d95ff"),
    ("#a64c08", "#d9822b"),
    ("#007f6f", "#86ecb8"),
    ("#b564c8", "#c27fb4"),
    ("#9c8a14", "#e3c81a"),
    ("#7b001a", "#fe7271"),
    ("#066899", "#68d8ff"),
)
_DASHES = ((), (), (5.0, 1.8), (1.6, 1.6), (7.0, 1.8, 1.6, 1.8), (3.2, 1.6), (9.0, 2.2), (5.0, 1.6, 1.6, 1.6, 1.6, 1.6))
_MARKERS = ("o", "s", "D", "^", "v", "P", "X", "h")

INK = "#0a0b01"
"""Text of figures; the sentinel of `--ink`."""
MUTED = "#0a0b02"
"""Axes and tick labels; `--muted`."""
LINE = "#0a0b03"
"""Grid lines; `--line`."""
_ROLES = {INK: "--ink", MUTED: "--muted", LINE: "--line"}
_LEFTOVER = re.compile(r"#[0-9a-fA-F]{6}\b")


@dataclass(frozen=True, slots=True)
class Pen:
    """How one shape is drawn, wherever it appears."""

    index: int

    @property
    def sentinel(self) -> str:
        """The colour to draw with in matplotlib."""
        return f"#0a0c{self.index % len(_SERIES):02x}"

    @property
    def variable(self) -> str:
        """The CSS variable with the shape's colour."""
        return f"--series-{self.index % len(_SERIES)}"

    @property
    def dashes(self) -> tuple[float, ...]:
        """Dash lengths in line widths; empty for a solid line."""
        return _DASHES[(self.index + self.index // len(_SERIES)) % len(_DASHES)]

    @property
    def marker(self) -> str:
        """Matplotlib's marker."""
        return _MARKERS[self.index % len(_MARKERS)]


def theme_variables(theme: int) -> Markup:
    """CSS declarations of the shapes' colours; `theme` 0 is light, 1 is dark."""
    return Markup(" ".join(f"--series-{index}: {pair[theme]};" for index, pair in enumerate(_SERIES)))


def finish(svg: str, *, label: str, names: dict[str, str]) -> Markup:
    """Matplotlib's SVG made fit to stand in a page.

    Sentinels become CSS variables, fonts and identifiers that would clash with the page's go, placeholders in `names`
    become escaped text.
    """
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<style[^>]*>.*?</style>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<defs>\s*</defs>\s*", "", body)
    body = re.sub(r'<g id="[^"]*">', "<g>", body)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    body = re.sub(r"font: ((?:\w+ )*[0-9.]+px) [^;\"]*", r"font: \1 var(--sans)", body)  # as matplotlib once wrote it
    view_box = re.search(r'viewBox="[^"]*"', body)
    head = f'<svg {view_box.group() if view_box else ""} role="img" aria-label="{escape(label)}"'
    body = re.sub(r"<svg[^>]*", lambda _: head, body, count=1)
    for sentinel, variable in _ROLES.items():
        body = body.replace(sentinel, f"var({variable})")
    for index in range(len(_SERIES)):
        pen = Pen(index)
        body = body.replace(pen.sentinel, f"var({pen.variable})")
    leftover = _LEFTOVER.search(re.sub(r'(?:href="|url\()#\w+', "", body))
    if leftover:
        raise ValueError(f"figure {label!r}: colour {leftover.group()} is in no theme")
    if names:
        body = re.sub("|".join(map(re.escape, names)), lambda found: str(escape(names[found.group()])), body)
    return Markup(re.sub(r">\s+<", "><", body))
