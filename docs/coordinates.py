"""Draws coordinate checks side by side: `python docs/coordinates.py FOLDER FOLDER` writes docs/images/coordinates.svg.

The folders are those of `entasis coordinates`; docs/transfer.md says which two.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from entasis.report.coordinates import size_figure
from entasis.report.ink import theme_variables
from entasis.report.scaling_schema import Coordinates

_COLUMN, _PANEL, _TOP, _TITLE = 376, 210, 34, 24
_QUANTITIES = ("attention 4", "MLP 4", "logits")
_LIGHT = f"--paper:#fbfaf8;--ink:#1c2024;--muted:#5c646e;--line:#d9d5cd;{theme_variables(0)}"
_DARK = f"--paper:#14171b;--ink:#e7e5e0;--muted:#a2a9b2;--line:#373d45;{theme_variables(1)}"
_STYLE = (
    f"svg{{{_LIGHT}--sans:system-ui,sans-serif}}@media(prefers-color-scheme:dark){{svg{{{_DARK}}}}}"
    "text{font-family:system-ui,sans-serif;fill:var(--ink)}.h{font-size:14px;font-weight:600}.q{font-size:12px}"
)


def picture(checks: list[Coordinates]) -> str:
    """One SVG: a column per check, a row per quantity."""
    height = _TOP + len(_QUANTITIES) * (_PANEL + _TITLE)
    parts = []
    for column, check in enumerate(checks):
        left = column * _COLUMN
        base = check["base_width"]
        words = "As published, the same at every width" if base is None else "Divisor and blocks’ rate follow the width"
        parts.append(f'<text class="h" x="{left + 8}" y="20">{words}</text>')
        for row, name in enumerate(_QUANTITIES):
            top = _TOP + row * (_PANEL + _TITLE)
            quantity = next(each for each in check["quantities"] if each["name"] == name)
            parts.append(f'<text class="q" x="{left + 8}" y="{top + 14}">{name}</text>')
            drawing = str(size_figure(quantity, check["steps"]))
            drawing = re.sub(r'(id="|href="#|url\(#)(\w)', rf"\g<1>c{column}\2", drawing)  # ids stay apart
            drawing = re.sub(r'"[^"]*"', _rounded, drawing)
            place = f'<svg x="{left}" y="{top + _TITLE}" width="360" height="{_PANEL}"'
            parts.append(drawing.replace("<svg", place, 1))
    width = _COLUMN * len(checks)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="Coordinate checks"><style>{_STYLE}</style>'
        f'<rect width="{width}" height="{height}" fill="var(--paper)"/>{"".join(parts)}</svg>\n'
    )


def _rounded(attribute: re.Match[str]) -> str:
    """An attribute's numbers with two decimals, which halves the file."""
    return re.sub(r"(\d+\.\d\d)\d+", r"\g<1>", attribute.group())


if __name__ == "__main__":
    folders = [Path(folder) for folder in sys.argv[1:]]
    loaded = [json.loads((folder / "results.json").read_text(encoding="utf-8")) for folder in folders]
    target = Path(__file__).parent / "images" / "coordinates.svg"
    target.write_text(picture(loaded), encoding="utf-8")
    print(target)
