"""The carried residual stream, as far as it is arithmetic: which coordinates can a layer find non-zero?"""

from __future__ import annotations

from entasis.shape.model_config import ModelConfig
from entasis.shape.records import Shape


def qkv_input_widths(shape: Shape, config: ModelConfig) -> tuple[int, ...]:
    """Input width of the query, key and value projections of each layer, as stored.

    The stream starts with `embed_width` coordinates, the rest zero, and grows as wider layers write. RMSNorm keeps a
    zero a zero, so projections need no column for coordinates that nothing has written yet: the width is
    min(w_l, max(embed_width, w_1 .. w_{l-1})). LayerNorm moves zeros, so there everything is read.
    """
    widths = []
    written = shape.embed_width
    for layer in shape.layers:
        widths.append(min(layer.width, written) if config.norm == "rmsnorm" else layer.width)
        written = max(written, layer.width)
    return tuple(widths)
