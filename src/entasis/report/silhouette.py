"""The silhouettes of shapes: one bar per layer, as wide as the layer, cut into its heads; all shapes on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from entasis.shape.records import LayerShape, Shape

VIEW_WIDTH = 200.0
_EDGE = 2.0
_NARROWEST_SEGMENT = 2.2
"""Narrower heads would drown in their gaps; such a bar is drawn whole."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One layer, in the units of the drawing."""

    x: str
    y: str
    width: str
    gaps: str
    """SVG path of the vertical gaps between heads; empty where there are none to draw."""
    gap_width: str
    attention: bool
    title: str


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Neighbouring layers that are equal, as a row of a table."""

    layers: str
    layer: LayerShape


@dataclass(frozen=True, slots=True)
class Silhouette:
    """One shape's drawing and the words below it. The first layer is at the bottom, where tokens enter."""

    height: str
    bar_height: str
    bars: tuple[Bar, ...]
    embed: Bar
    head: Bar
    label: str
    widths: str
    heads: str
    groups: tuple[LayerGroup, ...]


def silhouettes(shapes: Sequence[Shape]) -> list[Silhouette]:
    """Drawings of all shapes; widths and layer heights are comparable between them."""
    scale = (VIEW_WIDTH - 2 * _EDGE) / max(shape.stream_width for shape in shapes)
    pitch = min(16.0, max(5.0, 190.0 / max(len(shape.layers) for shape in shapes)))
    return [_silhouette(shape, scale, pitch) for shape in shapes]


def _silhouette(shape: Shape, scale: float, pitch: float) -> Silhouette:
    count = len(shape.layers)
    top = 2 * _EDGE + 3
    bar_height = pitch * 0.82
    bars = []
    for number, layer in enumerate(shape.layers, start=1):
        y = top + (count - number) * pitch
        bars.append(_bar(layer.width * scale, y, bar_height, layer.heads, _title(number, layer)))
    bottom = top + count * pitch + 1
    embed = _bar(shape.embed_width * scale, bottom, 2.0, 1, f"Embedding: width {shape.embed_width:,}")
    head = _bar(shape.head_width * scale, _EDGE, 2.0, 1, f"Head: reads width {shape.head_width:,}")
    widths, heads = [layer.width for layer in shape.layers], [layer.heads for layer in shape.layers]
    return Silhouette(
        height=_text(bottom + 2.0 + _EDGE),
        bar_height=_text(bar_height),
        bars=tuple(bars),
        embed=embed,
        head=head,
        label=f"{count} layers; widths from first to last: {', '.join(map(str, widths))}",
        widths=_span(widths),
        heads=_span(heads),
        groups=tuple(_groups(shape.layers)),
    )


def _bar(width: float, y: float, height: float, segments: int, title: str) -> Bar:
    x = (VIEW_WIDTH - width) / 2
    gap = min(1.2, 0.22 * width / max(segments, 1))
    gaps = ""
    if segments > 1 and width / segments >= _NARROWEST_SEGMENT:
        cuts = (x + width * cut / segments for cut in range(1, segments))
        gaps = "".join(f"M{_text(cut)} {_text(y)}v{_text(height)}" for cut in cuts)
    return Bar(_text(x), _text(y), _text(width), gaps, _text(gap), segments > 0, title)


def _title(number: int, layer: LayerShape) -> str:
    attention = f"{layer.heads} heads of {layer.head_dim}" if layer.has_attention else "no attention"
    if layer.kv_heads != layer.heads:
        attention += f", {layer.kv_heads} key/value heads"
    mlp = f"MLP {layer.mlp_hidden:,}" if layer.has_mlp else "no MLP"
    return f"Layer {number}: width {layer.width:,}, {attention}, {mlp}"


def _groups(layers: Sequence[LayerShape]) -> list[LayerGroup]:
    groups = []
    for layer, run in groupby(enumerate(layers, start=1), key=lambda pair: pair[1]):
        numbers = [number for number, _ in run]
        label = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
        groups.append(LayerGroup(label, layer))
    return groups


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _text(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
