"""Rotary scaling: how rotary positions are stretched over a context longer than the one that they were made for.

Plain data; the angles that follow from it are computed in `entasis.model.rotary`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from entasis.errors import ConfigError
from entasis.settings import nearest, shorten
from entasis.shape.records import LARGEST_SIZE

Kind = Literal["linear", "ntk", "yarn", "llama3"]

_FIELDS: dict[str, dict[str, float | int | None]] = {
    "linear": {},
    "ntk": {},
    "yarn": {"original_context": None, "beta_fast": 32.0, "beta_slow": 1.0, "temperature": None},
    "llama3": {"original_context": None, "low_frequency": 1.0, "high_frequency": 4.0},
}
"""What each kind knows beside its factor, and the published value; None: must be given (or follows from the factor)."""


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """One way of stretching, whole. A field that its kind does not know stays None.

    Raises:
        ConfigError: a field is missing, out of range, or belongs to another kind; the line names it.
    """

    kind: Kind
    """`linear`: positions are divided by the factor (position interpolation). `ntk`: the base grows so that the slowest
    pair turns slower by the factor and the fastest not at all. `yarn`: pairs that turn seldom within the original
    context are slowed, those that turn often are not. `llama3`: the same, with Llama 3's bounds and smoothing."""
    factor: float
    """New context / original context; at least 1."""
    original_context: int | None = None
    """yarn and llama3: the context in tokens that the model was first trained at."""
    beta_fast: float | None = None
    """yarn: pairs with more turns than this within the original context are left alone."""
    beta_slow: float | None = None
    """yarn: pairs with fewer are slowed by the whole factor."""
    temperature: float | None = None
    """yarn: what cosines and sines are multiplied by, and attention's logits so by its square; 0.1 ln(factor) + 1
    unless given."""
    low_frequency: float | None = None
    """llama3: pairs with fewer turns than this within the original context are slowed by the whole factor."""
    high_frequency: float | None = None
    """llama3: pairs with more are left alone."""

    def __post_init__(self) -> None:
        if self.kind not in _FIELDS:
            kinds = ", ".join(get_args(Kind))
            raise ConfigError(f"kind: expected one of {kinds} (or no rotary scaling at all); got {shorten(self.kind)}")
        known = _FIELDS[self.kind]
        _require_number("factor", self.factor, least=1)
        for field in dataclasses.fields(self):
            if field.name in ("kind", "factor"):
                continue
            value = getattr(self, field.name)
            if field.name not in known:
                if value is not None:
                    raise ConfigError(f"{field.name}: {self.kind} has no such field; it has "
                                      f"{', '.join(['factor', *known])}")  # fmt: skip
                continue
            if value is None:
                object.__setattr__(self, field.name, self._published(field.name))
            elif field.name != "original_context":
                _require_number(field.name, value)
        if "original_context" in known:
            self._require_original_context()
        for low, high in (("beta_slow", "beta_fast"), ("low_frequency", "high_frequency")):
            if low in known and not getattr(self, low) < getattr(self, high):
                raise ConfigError(f"{low}: expected below {high} {getattr(self, high)}, got {getattr(self, low)}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the fields that the kind knows; `from_dict` is the inverse."""
        return {name: getattr(self, name) for name in ("kind", "factor", *_FIELDS[self.kind])}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RotaryScaling:
        """The inverse of `to_dict`; fields with a published value may be left out, unknown ones are errors."""
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(data, Mapping):
            raise ConfigError(f"expected an object with {', '.join(known)}, got {shorten(data)}")
        for name in data:
            if name not in known:
                raise ConfigError(
                    f"{shorten(name)}: unknown field{nearest(str(name), known)}; known: {', '.join(known)}"
                )
        for name in ("kind", "factor"):
            if name not in data:
                raise ConfigError(f"{name}: missing")
        return cls(**data)

    def _published(self, name: str) -> float | int | None:
        return 0.1 * math.log(self.factor) + 1 if name == "temperature" else _FIELDS[self.kind][name]

    def _require_original_context(self) -> None:
        tokens: object = self.original_context
        if tokens is None:
            raise ConfigError(f"original_context: missing; {self.kind} needs the context that the model was made for")
        if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= LARGEST_SIZE:
            raise ConfigError(
                f"original_context: expected a whole number from 1 to {LARGEST_SIZE}, got {shorten(tokens)}"
            )


def _require_number(name: str, value: object, least: float = 0) -> None:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (number >= least if least else number > 0) or number == math.inf:
        raise ConfigError(f"{name}: expected a number {f'from {least}' if least else 'above 0'}, got {shorten(value)}")
