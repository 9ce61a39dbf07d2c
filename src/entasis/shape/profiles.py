"""Profiles: functions of depth that give one number per layer. Families combine them; others can be registered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from entasis.errors import ShapeError

Profile = Callable[..., list[float]]
"""Takes the number of layers and the profile's own settings, returns one number per layer."""

_STEEPNESS = 10.0
"""Of the sigmoid, over the whole depth."""

PROFILES: dict[str, Profile] = {}


def profile(name: str) -> Callable[[Profile], Profile]:
    """Registers a profile under a name; the decorated function takes `layers` first."""

    def register(function: Profile) -> Profile:
        PROFILES[name] = function
        return function

    return register


@profile("constant")
def constant(layers: int, value: float) -> list[float]:
    """The same number in every layer."""
    return [value] * layers


@profile("listed")
def listed(layers: int, values: Sequence[float]) -> list[float]:
    """The numbers themselves, one per layer."""
    if len(values) != layers:
        raise ShapeError(f"{len(values)} values listed for {layers} layers; give one per layer")
    return list(values)


@profile("staircase")
def staircase(layers: int, steps: Sequence[tuple[float, int]]) -> list[float]:
    """Each (value, number of layers) in turn; the last value fills what is left."""
    values = [value for value, hold in steps for _ in range(hold)]
    if not values or len(values) > layers:
        raise ShapeError(f"a staircase of {len(values)} layers does not fit {layers} layers")
    return values + [values[-1]] * (layers - len(values))


@profile("geometric")
def geometric(layers: int, factor: float, turn: int | None = None) -> list[float]:
    """Starts at 1 and multiplies by `factor` per layer; after layer `turn` (from 1) it returns to 1 at the last one."""
    turn = layers if turn is None else turn
    # Powers rather than a running product: both ends are exactly 1, and no step back can overflow.
    down = [factor**steps for steps in range(turn)]
    back = [factor ** ((turn - 1) * steps / (layers - turn)) for steps in reversed(range(layers - turn))]
    return down + back


@profile("linear")
def linear(layers: int, first: float, last: float) -> list[float]:
    """A straight line from `first` to `last`."""
    return [first + (last - first) * _depth(number, layers) for number in range(layers)]


@profile("cosine")
def cosine(layers: int, first: float, last: float) -> list[float]:
    """Half a cosine wave from `first` to `last`: flat at both ends."""
    return [last + (first - last) * (1 + math.cos(math.pi * _depth(n, layers))) / 2 for n in range(layers)]


@profile("sigmoid")
def sigmoid(layers: int, first: float, last: float) -> list[float]:
    """A logistic step from `first` to `last`, steepest in the middle and exact at both ends."""
    low, high = _logistic(-_STEEPNESS / 2), _logistic(_STEEPNESS / 2)
    shares = [(_logistic(_STEEPNESS * (_depth(n, layers) - 0.5)) - low) / (high - low) for n in range(layers)]
    return [first + (last - first) * share for share in shares]


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _depth(index: int, layers: int) -> float:
    """Depth of a layer (index from 0), from 0 at the first to 1 at the last."""
    return index / (layers - 1) if layers > 1 else 0.0
