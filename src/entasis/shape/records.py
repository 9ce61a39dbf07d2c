"""The two records that everything depends on: one layer, and the list of them that makes a shape."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from entasis.errors import ShapeError
from entasis.settings import nearest, parse_json, parse_yaml, shorten

LARGEST_SIZE = 2**31 - 1
"""Of anything that is counted here; beyond it no tensor library is safe."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One transformer layer: what it reads and writes of the residual stream, and with how much.

    `heads * head_dim` need not equal `width`. All sizes are counts of coordinates, except `window` (tokens).
    """

    width: int
    """Residual coordinates that the layer reads and writes: [0, width)."""
    heads: int
    """Query heads; 0: the layer has no attention."""
    kv_heads: int
    """Key/value heads; equal to `heads` without grouping."""
    head_dim: int
    """Width of one query and key head."""
    mlp_hidden: int
    """Hidden units of the MLP (of one expert in a mixture-of-experts layer); 0: the layer has no MLP."""
    value_dim: int | None = None
    """Width of one value head; None: `head_dim`."""
    window: int | None = None
    """Attention window in tokens; None: the whole context."""
    experts: int = 0
    """Experts of the MLP; 0: dense."""
    experts_per_token: int = 0

    @property
    def value_head_dim(self) -> int:
        """Width of one value head, with the default resolved."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def qkv_width(self) -> int:
        """Output width of the query, key and value projections together."""
        return self.heads * self.head_dim + self.kv_heads * (self.head_dim + self.value_head_dim)

    @property
    def has_attention(self) -> bool:
        """Whether the layer has an attention sub-layer."""
        return self.heads > 0

    @property
    def has_mlp(self) -> bool:
        """Whether the layer has an MLP sub-layer."""
        return self.mlp_hidden > 0


_LEAST = {"width": 1, "window": 1, "value_dim": 1}  # every other field may be 0
_OPTIONAL = {"value_dim", "window"}
_SHAPE_FIELDS = ("layers", "embed_width", "unembed_width")
_LAYER_FIELDS = tuple(field.name for field in dataclasses.fields(LayerShape))
_REQUIRED = tuple(f.name for f in dataclasses.fields(LayerShape) if f.default is dataclasses.MISSING)


@dataclass(frozen=True, slots=True)
class Shape:
    """A transformer's shape: its layers in order, and the widths at which tokens enter and leave.

    Raises:
        ShapeError: a field is no whole number, too small or too large; the line names layer and field. What a *valid*
            shape must fulfil beyond that (heads that group evenly, even head dims under rotary positions, ...) is the
            business of `entasis.shape.rules`.
    """

    layers: tuple[LayerShape, ...]
    embed_width: int
    """Width of the token embedding (and of learned positions)."""
    unembed_width: int | None = None
    """Width of the head's input; None: `embed_width`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ShapeError("layers: a shape needs at least one layer")
        for number, layer in enumerate(self.layers, start=1):
            if not isinstance(layer, LayerShape):
                raise ShapeError(f"expected a LayerShape, got {shorten(layer)}", number)
            for name in _LAYER_FIELDS:
                value = getattr(layer, name)
                if value is None and name in _OPTIONAL:
                    continue
                _check_size(name, value, _LEAST.get(name, 0), number)
        _check_size("embed_width", self.embed_width, 1)
        if self.unembed_width is not None:
            _check_size("unembed_width", self.unembed_width, 1)

    @property
    def head_width(self) -> int:
        """Input width of the head (`unembed_width` with its default resolved)."""
        return self.embed_width if self.unembed_width is None else self.unembed_width

    @property
    def stream_width(self) -> int:
        """Width of the whole residual stream: the widest of embedding, head and layers."""
        return max(self.embed_width, self.head_width, *(layer.width for layer in self.layers))

    @property
    def distinct_layers(self) -> int:
        """How many different layer records there are (each is one graph under per-block compilation)."""
        return len(set(self.layers))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, every field written out; `from_dict` is the inverse."""
        return dataclasses.asdict(self) | {"layers": [dataclasses.asdict(layer) for layer in self.layers]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Shape:
        """The inverse of `to_dict`; fields with a default may be left out, unknown ones are errors."""
        if not isinstance(data, Mapping):
            raise ShapeError(f"a shape is an object with {', '.join(_SHAPE_FIELDS)}; got {shorten(data)}")
        _check_names(data, known=_SHAPE_FIELDS, required=("layers", "embed_width"))
        if not isinstance(data["layers"], list | tuple):
            raise ShapeError(f"layers: expected a list with one object per layer; got {shorten(data['layers'])}")
        layers = []
        for number, layer in enumerate(data["layers"], start=1):
            if not isinstance(layer, Mapping):
                raise ShapeError(f"expected an object with {', '.join(_REQUIRED)}; got {shorten(layer)}", number)
            _check_names(layer, known=_LAYER_FIELDS, required=_REQUIRED, layer=number)
            layers.append(LayerShape(**layer))
        return cls(tuple(layers), data["embed_width"], data.get("unembed_width"))

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Shape:
        """The inverse of `to_json`.

        Raises:
            ConfigError: the text is not JSON.
            ShapeError: it is not a shape; the line names layer and field.
        """
        return cls.from_dict(parse_json(text, "shape"))

    def to_yaml(self) -> str:
        """`to_dict` as YAML text, a line a layer."""
        return str(yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None, width=200))

    @classmethod
    def from_yaml(cls, text: str) -> Shape:
        """The inverse of `to_yaml`.

        Raises:
            ConfigError: the text is not YAML.
            ShapeError: it is not a shape; the line names layer and field.
        """
        return cls.from_dict(parse_yaml(text, "shape"))


def _check_size(name: str, value: object, least: int, layer: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ShapeError(f"{name}: expected a whole number, got {shorten(value)}", layer)
    if not least <= value <= LARGEST_SIZE:
        bound = f"at least {least}" if value < least else f"at most {LARGEST_SIZE}"
        raise ShapeError(f"{name}: expected {bound}, got {shorten(value)}", layer)


def _check_names(
    data: Mapping[str, Any], known: tuple[str, ...], required: tuple[str, ...], layer: int | None = None
) -> None:
    for name in data:
        if name not in known:
            hint = nearest(str(name), known)
            raise ShapeError(f"unknown field {shorten(name)}{hint}; known: {', '.join(known)}", layer)
    for name in required:
        if name not in data:
            raise ShapeError(f"{name}: missing", layer)
