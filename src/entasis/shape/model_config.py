"""What a block is made of: the choices that are the same in every layer. Plain data, since counting needs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from entasis.errors import ConfigError
from entasis.settings import shorten
from entasis.shape.records import LARGEST_SIZE
from entasis.shape.rotary_scaling import RotaryScaling

Style = Literal["gpt2", "llama"]
Norm = Literal["layernorm", "rmsnorm"]
Positions = Literal["learned", "rotary"]
Activation = Literal["gelu", "swiglu"]
Resize = Literal["carry", "zero", "projection", "projection-missing", "gated", "interpolation", "constant"]
AttentionScale = Literal["sqrt", "linear"]
Initialisation = Literal["scaled", "mup"]

_STYLES: dict[str, dict[str, Any]] = {
    "gpt2": {"norm": "layernorm", "positions": "learned", "activation": "gelu", "bias": True, "tied": True},
    "llama": {"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "bias": False, "tied": False},
}
_CHOICES: dict[str, tuple[object, ...]] = {
    "style": get_args(Style),
    "norm": get_args(Norm),
    "positions": get_args(Positions),
    "activation": get_args(Activation),
    "bias": (True, False),
    "tied": (True, False),
    "resize": get_args(Resize),
    "attention_scale": get_args(AttentionScale),
    "initialisation": get_args(Initialisation),
    "causal": (True, False),
}
# None is never seen after construction: __post_init__ fills in what the style says.
_AS_STYLE = cast(Any, None)
_ROTARY_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The block: a ready set by `style`, of which each part can be set by itself.

    `gpt2`: LayerNorm, learned positions, GELU (tanh) MLP, biases, tied embeddings.
    `llama`: RMSNorm, rotary positions (half-split), SwiGLU, no biases, untied embeddings.

    Raises:
        ConfigError: a field has a value outside its choices or range; the line names the field.
    """

    vocab_size: int
    context: int
    """Longest sequence in tokens; the number of rows of learned positions."""
    style: Style = "llama"
    norm: Norm = _AS_STYLE
    positions: Positions = _AS_STYLE
    activation: Activation = _AS_STYLE
    bias: bool = _AS_STYLE
    """Biases of linear layers and of LayerNorm. RMSNorm and the head never have one."""
    tied: bool = _AS_STYLE
    """Whether embedding and head are one table."""
    norm_epsilon: float = 1e-5
    rotary_theta: float = _ROTARY_THETA
    rotary_scaling: RotaryScaling | None = None
    """How rotary positions are stretched over a longer context; None: not at all."""
    resize: Resize = "carry"
    """What happens to coordinates between layers of different width. All but `carry` exist as ablations only."""
    attention_scale: AttentionScale = "sqrt"
    """Attention logits are divided by the square root of the head dim, or (muP) by the head dim itself."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Of what each sub-layer adds to the stream."""
    logit_divisor: float = 1.0
    initialisation: Initialisation = "scaled"
    """`scaled`: this project's (docs/model.md); `mup`: the published ><former recipe's."""
    causal: bool = True
    """False: an encoder, every token attends to the whole window (or document)."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value is None and self.style in _STYLES and name in _STYLES[self.style]:
                object.__setattr__(self, name, _STYLES[self.style][name])
            elif not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
                raise ConfigError(f"{name}: expected one of {', '.join(map(str, allowed))}; got {value!r}")
        for name in ("vocab_size", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST_SIZE:
                raise ConfigError(f"{name}: expected a whole number from 1 to {LARGEST_SIZE}, got {shorten(value)}")
        for name in (
            "norm_epsilon", "rotary_theta", "embedding_multiplier", "residual_multiplier", "logit_divisor"
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise ConfigError(f"{name}: expected a number above 0, got {value!r}")

        if self.positions != "rotary" and self.rotary_theta != _ROTARY_THETA:
            raise ConfigError(f"rotary_theta: positions are {self.positions}, not rotary; remove one")
        if self.rotary_scaling is not None:
            self._require_scalable_positions()

    def _require_scalable_positions(self) -> None:
        if self.positions != "rotary":
            raise ConfigError(f"rotary_scaling: positions are {self.positions}, not rotary; remove one")
        if not isinstance(self.rotary_scaling, RotaryScaling):
            raise ConfigError(f"rotary_scaling: expected a RotaryScaling, got {shorten(self.rotary_scaling)}")
        if self.rotary_scaling.kind == "yarn" and self.rotary_theta <= 1:
            raise ConfigError(f"rotary_scaling: yarn needs a rotary_theta above 1, got {self.rotary_theta}")

    @property
    def mlp_input_matrices(self) -> int:
        """Matrices from the stream into the MLP's hidden units: 2 when gated (SwiGLU), else 1."""
        return 2 if self.activation == "swiglu" else 1

    @property
    def norm_has_bias(self) -> bool:
        """Whether norms carry a bias beside their weight."""
        return self.norm == "layernorm" and self.bias

    def to_dict(self) -> dict[str, Any]:
        """Plain data, every part resolved; `from_dict` is the inverse."""
        scaling = None if self.rotary_scaling is None else self.rotary_scaling.to_dict()
        return dataclasses.asdict(self) | {"rotary_scaling": scaling}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`; parts that the style decides may be left out, unknown fields are errors."""
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(data, Mapping):
            raise ConfigError(f"model: expected an object with fields of {', '.join(known)}")
        for name in data:
            if name not in known:
                raise ConfigError(f"{name}: unknown field of a model configuration; known: {', '.join(known)}")
        for name in ("vocab_size", "context"):
            if name not in data:
                raise ConfigError(f"{name}: missing")
        given = dict(data)
        if given.get("rotary_scaling") is not None:
            try:
                given["rotary_scaling"] = RotaryScaling.from_dict(given["rotary_scaling"])
            except ConfigError as error:
                raise ConfigError(f"rotary_scaling: {error}") from None
        return cls(**given)
