"""What a family is: what it returns, how one is registered, and the checks that families share.

A family is a function of keyword settings that returns a Design. Every family knows its reference, the straight column
that it is compared with: the uniform shape of the same depth and reference width.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_type_hints

from entasis.errors import ConfigError, ShapeError
from entasis.shape import rules
from entasis.shape.records import LARGEST_SIZE, Shape

PerLayer = int | Sequence[int]
"""One number for every layer, or a list with one per layer."""

LARGEST_DEPTH = 10_000
"""Layers beyond which a request is taken for a slip of the keyboard."""


@dataclass(frozen=True, slots=True)
class Design:
    """A family's answer to a request: the shape, what it is measured against, and what the rules say of it."""

    family: str
    shape: Shape
    reference: Shape
    """The uniform shape at the same reference width."""
    findings: tuple[rules.Finding, ...] = ()
    """Errors first."""


Build = Callable[..., Design]
FAMILIES: dict[str, Build] = {}


def register_family(name: str, shared: type | None = None) -> Callable[[Build], Build]:
    """Registers a family. The function takes keyword settings and `config`, and returns a Design without findings of
    the general rules, which `entasis.shape.families.design` adds.

    Families with many settings in common take them as one dataclass, `shared`, in front of their own; registered is a
    function of all of them by keyword.
    """

    def register(build: Build) -> Build:
        FAMILIES[name] = build if shared is None else _spread_out(build, shared)
        return build

    return register


def _spread_out(build: Build, shared: type) -> Build:
    """A function whose first parameter is the dataclass `shared`, as one that takes its fields by keyword."""
    fields = dataclasses.fields(shared)

    @functools.wraps(build)
    def by_keyword(**settings: object) -> Design:
        common = {field.name: settings.pop(field.name) for field in fields if field.name in settings}
        return build(shared(**common), **settings)

    kind = inspect.Parameter.KEYWORD_ONLY
    own = list(inspect.signature(build).parameters.values())[1:]
    missing = dataclasses.MISSING
    common = [
        inspect.Parameter(each.name, kind, default=inspect.Parameter.empty if each.default is missing else each.default)
        for each in fields
    ]
    by_keyword.__signature__ = inspect.Signature([*common, *own])  # type: ignore[attr-defined]
    by_keyword.__annotations__ = get_type_hints(shared) | get_type_hints(build)
    return by_keyword


# --- checks that families share ---------------------------------------------------------------------------------------


def require_depth(layers: int, least: int = 1, why: str = "") -> None:
    """Raises a ConfigError unless there are `least` layers or more, and not absurdly many."""
    if not least <= layers <= LARGEST_DEPTH:
        raise ConfigError(f"layers: expected from {least} to {LARGEST_DEPTH}{why}, got {layers}")


def require_positive(**values: float | None) -> None:
    """Raises a ConfigError naming the first value that is given and not above 0, or absurdly large."""
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name}: expected above 0, got {value}")
        _require_at_most(name, value)


def require_not_negative(**values: float | None) -> None:
    """Raises a ConfigError naming the first value that is given and below 0, or absurdly large."""
    for name, value in values.items():
        if value is not None and not value >= 0:
            raise ConfigError(f"{name}: expected at least 0, got {value}")
        _require_at_most(name, value)


def require_experts(experts: int, experts_per_token: int, expert_hidden: int | None, mlp_hidden: int | None) -> None:
    """Raises a ConfigError unless the settings of a mixture of experts are given together and fit."""
    require_not_negative(experts=experts, experts_per_token=experts_per_token)
    require_positive(expert_hidden=expert_hidden)
    if not experts and (experts_per_token or expert_hidden is not None):
        raise ConfigError("experts: missing; experts_per_token and expert_hidden go with a number of experts")
    if experts and expert_hidden is None:
        raise ConfigError("expert_hidden: missing; a mixture of experts needs the hidden units of one expert")
    if experts and mlp_hidden is not None:
        raise ConfigError("mlp_hidden: a mixture of experts has expert_hidden instead")
    if experts and not 1 <= experts_per_token <= experts:
        raise ConfigError(f"experts_per_token: expected from 1 to {experts}, got {experts_per_token}")


def per_layer(name: str, value: PerLayer, layers: int, least: int) -> list[int]:
    """A setting that is one number or a list, as a list with one number per layer.

    Raises:
        ConfigError: the list has another length.
        ShapeError: a number is below `least`; names the layer.
    """
    values = [value] * layers if isinstance(value, int) else list(value)
    if len(values) != layers:
        raise ConfigError(f"{name}: {len(values)} values for {layers} layers; give one per layer")
    for number, each in enumerate(values, start=1):
        if each < least:
            raise ShapeError(f"{name} {each}; expected at least {least}", number)
    return values


def rounded(value: float, multiple: int) -> int:
    """The nearest multiple (ties to even), but at least one."""
    return max(multiple, round(value / multiple) * multiple)


def _require_at_most(name: str, value: float | None) -> None:
    if value is not None and value > LARGEST_SIZE:
        raise ConfigError(f"{name}: expected at most {LARGEST_SIZE}, got {value}")
