"""Draws the README's picture of shapes: `python docs/figures.py` writes docs/images/shapes.svg."""

from __future__ import annotations

from pathlib import Path

import entasis
from entasis import Shape
from entasis.report.silhouette import VIEW_WIDTH, Bar, Silhouette, silhouettes

SHAPES = {
    "uniform": (entasis.uniform(layers=12, width=768, heads=12), "the straight column: every layer alike"),
    "prism": (
        entasis.prism(width=768, heads=[3, 3, 3, 6, 6, 6, 12, 12, 12, 12, 12, 12]),
        "few wide heads early, same cost",
    ),
    "bowtie": (
        entasis.bowtie(layers=12, width=768, heads=16),
        "wide ends, narrow waist, same effective parameters",
    ),
}
_COLUMN, _TOP = 260.0, 12.0
_STYLE = (
    "text{font-family:system-ui,sans-serif;fill:#333}.s{font-size:11px;fill:#777}"
    "rect{fill:#555}path{stroke:#fff}.prism rect{fill:#1a4fc0}.bowtie rect{fill:#a8480b}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.s{fill:#999}rect{fill:#aaa}path{stroke:#111}"
    ".prism rect{fill:#7da2ff}.bowtie rect{fill:#f09a5b}}"
)


def picture(shapes: dict[str, tuple[Shape, str]]) -> str:
    """One SVG with the silhouettes side by side on one scale; tokens enter at the bottom."""
    drawn = silhouettes([shape for shape, _ in shapes.values()])
    height = max(float(each.height) for each in drawn) + 60
    parts = []
    for index, ((name, (_, words)), each) in enumerate(zip(shapes.items(), drawn, strict=True)):
        left = index * _COLUMN + (_COLUMN - VIEW_WIDTH) / 2
        bottom = float(each.height) + _TOP
        parts.append(f'<g class="{name}" transform="translate({left:g} {_TOP:g})">{_bars(each)}</g>')
        centre = left + VIEW_WIDTH / 2
        parts.append(f'<text x="{centre:g}" y="{bottom + 18:g}" text-anchor="middle" font-weight="600">{name}</text>')
        parts.append(f'<text class="s" x="{centre:g}" y="{bottom + 36:g}" text-anchor="middle">{words}</text>')
    width = _COLUMN * len(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="Silhouettes of {", ".join(shapes)}"><style>{_STYLE}</style>{"".join(parts)}</svg>\n'
    )


def _bars(silhouette: Silhouette) -> str:
    layers = "".join(_bar(bar, silhouette.bar_height) for bar in silhouette.bars)
    return layers + _bar(silhouette.embed, "2") + _bar(silhouette.head, "2")


def _bar(bar: Bar, height: str) -> str:
    gaps = f'<path d="{bar.gaps}" stroke-width="{bar.gap_width}"/>' if bar.gaps else ""
    return f'<rect x="{bar.x}" y="{bar.y}" width="{bar.width}" height="{height}"/>{gaps}'


if __name__ == "__main__":
    target = Path(__file__).parent / "images" / "shapes.svg"
    target.write_text(picture(SHAPES), encoding="utf-8")
    print(target)
