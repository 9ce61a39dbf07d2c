"""A chain of widths that turns once: solved for its budget, rounded, shuffled, and dressed with heads and MLPs.

A waist is told by its turning layer and that layer's width; the first width follows from the match, and the last one is
the first again (or the turning layer's own, where that is the last layer).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from entasis.errors import ConfigError, ShapeError
from entasis.shape import rules
from entasis.shape.match import Match, WidthCost, matched, matched_factor, matched_width
from entasis.shape.model_config import ModelConfig
from entasis.shape.profiles import geometric, linear
from entasis.shape.records import LayerShape, Shape
from entasis.shape.registry import Design, require_experts, require_not_negative, require_positive, rounded

Progression = Literal["geometric", "arithmetic"]
"""How widths go from the first to the turning layer: by a constant factor, or by a constant step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaistSettings:
    """What all families whose width turns have in common. Widths are rounded to `multiple`, head dims to
    `head_dim_multiple`, hidden units to `mlp_multiple`."""

    layers: int
    width: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    mlp_ratio: float = 4.0
    mlp_hidden: int | None = None
    multiple: int = 32
    head_dim_multiple: int | None = None
    """Heads together are then nearly as wide as their layer. None: they slice it."""
    mlp_multiple: int = 1
    progression: Progression = "geometric"
    permute: int | None = None
    """Seed by which the widths between the ends are shuffled."""
    match: Match = "effective"
    experts: int = 0
    experts_per_token: int = 0
    expert_hidden: int | None = None
    """Hidden units of one expert at the reference width; a layer's own follow its width."""
    config: ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Waist(WaistSettings):
    """Everything that decides a shape whose width turns once (or not, where the turn is the last layer)."""

    turn: int
    ratio: float
    """Width of the turning layer / reference width."""
    head_dims: Sequence[int] | None = None
    """Per layer, where they differ."""

    @classmethod
    def of(cls, settings: WaistSettings, *, turn: int, ratio: float, head_dims: Sequence[int] | None = None) -> Waist:
        """The settings of a family, and what it makes of its own."""
        common = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
        return cls(**common, turn=turn, ratio=ratio, head_dims=head_dims)

    def _check(self) -> None:
        """Raises a ConfigError that names a setting which is out of range."""
        require_positive(
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            mlp_ratio=self.mlp_ratio,
            multiple=self.multiple,
            head_dim_multiple=self.head_dim_multiple,
            mlp_multiple=self.mlp_multiple,
        )
        require_not_negative(mlp_hidden=self.mlp_hidden, permute=self.permute)
        require_experts(self.experts, self.experts_per_token, self.expert_hidden, self.mlp_hidden)
        for name, size, multiple in (
            ("head_dim", self.head_dim if self.head_dims is None else None, self.head_dim_multiple),
            ("mlp_hidden", self.mlp_hidden, self.mlp_multiple),
        ):
            if size and multiple and size % multiple:
                raise ConfigError(f"{name}: {size} is no multiple of {multiple}, its multiple; change one of the two")
        if self.head_dim and self.kv_heads and self.heads % self.kv_heads:
            raise ConfigError(f"kv_heads: {self.kv_heads} do not divide {self.heads} heads into groups")

    def design(self, family: str) -> Design:
        """The shape, checked and matched to its uniform reference.

        Raises:
            ConfigError: a setting is out of range.
            ShapeError: no such shape exists.
        """
        self._check()
        shape = self._shape()
        found = [] if self.head_dim or self.head_dim_multiple else rules.divides_width(shape)
        if found:
            even = 2 * self.heads
            found.append(rules.Finding("warning", None, f"with multiple: {even} (twice the {self.heads} heads) every "
                                       "layer's width divides into even heads; with head_dim_multiple: 2 heads are "
                                       "even, and need not slice it"))  # fmt: skip
        if not self.head_dim and self.width % self.heads:
            found.append(rules.Finding("warning", None, f"{self.heads} heads do not divide the reference width "
                                       f"{self.width}, so the uniform shape beside this one is only counted, not "
                                       "buildable"))  # fmt: skip
        return Design(family, shape, self.reference, tuple(found))

    @property
    def reference(self) -> Shape:
        """The straight column of the reference width."""
        exact = dataclasses.replace(self, head_dim_multiple=None, mlp_multiple=1)
        return Shape((exact._layer(self.width, self.head_dim),) * self.layers, self.width)

    def _layer(self, width: int, head_dim: int | None) -> LayerShape:
        """A layer of `width`: the same head count everywhere, as published, or the number of heads of one size whose
        width together is nearest to `width`."""
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        count = self.heads if head_dim is None else max(1, round(width / head_dim))
        return LayerShape(
            width=width,
            heads=count,
            kv_heads=kv_heads if head_dim is None else grouped(count, self.heads / kv_heads),
            head_dim=self._sliced(width) if head_dim is None else head_dim,
            mlp_hidden=self._hidden(width) if self.mlp_hidden is None else self.mlp_hidden,
            experts=self.experts,
            experts_per_token=self.experts_per_token,
        )

    def _sliced(self, width: int) -> int:
        """The head dim of `heads` heads in a layer of `width`."""
        multiple = self.head_dim_multiple
        return width // self.heads if multiple is None else rounded(width / self.heads, multiple)

    def _hidden(self, width: int) -> int:
        hidden = self._hidden_ratio * width
        return round(hidden) if self.mlp_multiple == 1 else rounded(hidden, self.mlp_multiple)

    @property
    def _rounds_widths_alone(self) -> bool:
        """Whether heads slice their layer and hidden units follow it, as the published solver takes for granted."""
        return self.head_dims is None and self.head_dim_multiple is None and self.mlp_multiple == 1

    @property
    def _hidden_ratio(self) -> float:
        """Hidden units (of one expert) per coordinate of width."""
        return self.mlp_ratio if self.expert_hidden is None else self.expert_hidden / self.width

    def _shape(self) -> Shape:
        if self.ratio == 1.0 and self._rounds_widths_alone:
            return self.reference
        if self.match == "effective" and self._rounds_widths_alone:
            first, shares = self._solved()
            # As published: the first width is rounded to a whole number, the chain multiplied out from it, and each
            # width rounded to the multiple only then.
            chain = [round(first) * share for share in shares]
            self._require_above_zero(min(chain), 1 + chain.index(min(chain)))
            return self._rounded(chain)
        self._require_above_zero(self.ratio * self.width, self.turn)
        return matched(
            lambda scale: self._rounded(self._chain(scale * self.width)), self.reference, self.match, self.config
        )

    def _require_above_zero(self, width: float, number: int) -> None:
        if round(width / self.multiple) == 0:
            raise ShapeError(f"width {width:.1f} rounds to 0 at multiple {self.multiple}; choose a milder shape or a "
                             "lower multiple", number)  # fmt: skip

    def _solved(self) -> tuple[float, Sequence[float]]:
        """The first width at which effective parameters match, and all widths as shares of it; real numbers."""
        if self.progression == "geometric" and self.ratio < 1:
            return matched_factor(
                self._cost(), lambda factor: geometric(self.layers, factor, self.turn),
                layers=self.layers, width=self.width, turn=self.turn, ratio=self.ratio,
            )  # fmt: skip
        first = matched_width(self._cost(), self._chain, self.layers, self.width)
        return first, [width / first for width in self._chain(first)]

    def _chain(self, first: float) -> list[float]:
        """Real-valued widths from the first one; the turning layer's is fixed."""
        at_turn = self.ratio * self.width
        if self.progression == "arithmetic":
            # Both halves run towards the turn, so that the ends are equal to the last bit.
            down = linear(self.turn, first, at_turn)
            back = linear(self.layers - self.turn + 1, first, at_turn)[::-1]
            return [*down, *back[1:]]
        shares = geometric(self.layers, (at_turn / first) ** (1 / (self.turn - 1)), self.turn)
        return [first * share for share in shares]

    def _rounded(self, chain: Sequence[float]) -> Shape:
        widths = [rounded(width, self.multiple) for width in chain]
        if self.permute is not None:
            middle = widths[1:-1]
            random.Random(self.permute).shuffle(middle)
            widths = [widths[0], *middle, widths[-1]]
        dims: Sequence[int | None] = self.head_dims or [self.head_dim] * self.layers
        return Shape(tuple(self._layer(width, dim) for width, dim in zip(widths, dims, strict=True)), self.width)

    def _cost(self) -> WidthCost:
        """Costs of a layer whose heads together are as wide as the layer."""
        matrices = self.config.mlp_input_matrices + 1
        qkv = 1 + 2 * (1.0 if self.kv_heads is None else self.kv_heads / self.heads)
        # Hidden units of all experts: `ratio` per coordinate of width, or a fixed number.
        ratio, fixed = (self._hidden_ratio, 0.0) if self.mlp_hidden is None else (0.0, float(self.mlp_hidden))
        ratio *= max(self.experts, 1)
        square = qkv + 1 + matrices * ratio
        if self.config.resize == "constant":
            # Every matrix of a block has the stream on one side, so that the sum of the widths is what is matched.
            return WidthCost(0.0, square * self.width, 0.0, 0.0, 0.0)
        return WidthCost(
            square=square,
            line=matrices * fixed + self.experts,  # the router reads the width once per expert
            first_waste_square=qkv,
            last_waste_square=ratio,
            last_waste_fixed=fixed,
        )


def grouped(heads: int, group: float) -> int:
    """The largest key/value head count that divides `heads` into groups of at least `group` query heads."""
    wanted = max(1.0, heads / group)
    return max(divisor for divisor in rules.divisors(heads) if divisor <= wanted)
