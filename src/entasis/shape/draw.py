"""A shape as plain text: its silhouette, its costs beside the straight column, and what the rules say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from entasis.shape.budget import Budget
from entasis.shape.records import LayerShape, Shape
from entasis.shape.rules import Finding

_FILLS = "█▓"  # neighbouring heads alternate
_LABELS = {
    "parameters": "parameters",
    "effective_parameters": "effective parameters",
    "embedding_parameters": "embedding parameters",
    "flops_per_token": "FLOPs / token",
    "effective_flops_per_token": "effective FLOPs / token",
    "kv_cache_bytes_per_token": "KV cache bytes / token",
    "decode_bytes_per_token": "decode bytes / token",
}


def silhouette(shape: Shape, columns: int = 100) -> str:
    """One line a layer: its numbers, and a centred bar as wide as its share of the stream, cut into its heads.

    Value heads of another width, windows and experts have columns where a layer has them.
    """
    extra = [name for name, cell in _EXTRA.items() if any(cell(layer) != _NOTHING for layer in shape.layers)]
    header = f"{'layer':>5} {'width':>6} {'heads':>9} {'mlp':>6} {''.join(f'{name:>8} ' for name in extra)} "
    room = max(16, columns - len(header))
    stream_width = shape.stream_width
    lines = [header.rstrip()]
    for number, layer in enumerate(shape.layers, start=1):
        bar = _bar(layer, max(1, round(room * layer.width / stream_width)))
        more = "".join(f"{_EXTRA[name](layer):>8} " for name in extra)
        mlp = layer.mlp_hidden if layer.has_mlp else "none"
        lines.append(f"{number:>5} {layer.width:>6} {_heads(layer):>9} {mlp:>6} {more} {bar.center(room)}".rstrip())
    if shape.head_width == shape.embed_width:
        lines.append(f"      embedding and head: {shape.embed_width} wide")
    else:
        lines.append(f"      embedding: {shape.embed_width} wide, head: {shape.head_width} wide")
    return "\n".join(lines)


def budget_table(budget: Budget, reference: Budget) -> str:
    """The costs, those of the uniform shape, and their ratio."""
    ratios = budget.ratio_to(reference)
    lines = [f"{'at ' + format(budget.context, ',') + ' tokens of context':<28}{'this':>18}{'uniform':>18}{'ratio':>9}"]
    for name, label in _LABELS.items():
        ratio = ratios[name]
        shown = "–" if ratio is None else f"{ratio:.4f}"
        lines.append(f"{label:<28}{getattr(budget, name):>18,}{getattr(reference, name):>18,}{shown:>9}")
    return "\n".join(lines)


def findings_text(findings: Sequence[Finding]) -> str:
    """One line a message; layers of which the same is said stand together."""
    grouped: dict[tuple[str, str], list[int]] = {}
    for finding in findings:
        layers = grouped.setdefault((finding.level, finding.message), [])
        if finding.layer is not None:
            layers.append(finding.layer)
    lines = []
    for (level, message), layers in grouped.items():
        where = f"layer{'s' * (len(layers) > 1)} {_ranges(layers)}: " if layers else ""
        lines.append(f"{level}: {where}{message}")
    return "\n".join(lines)


def _heads(layer: LayerShape) -> str:
    if not layer.has_attention:
        return "none"
    kv = "" if layer.kv_heads == layer.heads else f"/{layer.kv_heads}"
    return f"{layer.heads}{kv}×{layer.head_dim}"


def _values(layer: LayerShape) -> str:
    other = layer.has_attention and layer.value_head_dim != layer.head_dim
    return f"{layer.kv_heads}×{layer.value_head_dim}" if other else _NOTHING


def _window(layer: LayerShape) -> str:
    return str(layer.window) if layer.has_attention and layer.window is not None else _NOTHING


def _experts(layer: LayerShape) -> str:
    """Used of all; `mlp` is the size of one."""
    return f"{layer.experts_per_token} of {layer.experts}" if layer.has_mlp and layer.experts else _NOTHING


_NOTHING = "–"
_EXTRA: dict[str, Callable[[LayerShape], str]] = {"values": _values, "window": _window, "experts": _experts}


def _bar(layer: LayerShape, length: int) -> str:
    if not layer.has_attention:
        return "░" * length
    return "".join(_FILLS[(column * layer.heads // length) % 2] for column in range(length))


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as `1-3, 7`."""
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in _stretches(numbers))


def _stretches(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last
