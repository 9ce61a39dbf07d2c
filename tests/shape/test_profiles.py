"""Profiles: one number per layer."""

from __future__ import annotations

import math

import pytest

from entasis.errors import ShapeError
from entasis.shape.profiles import PROFILES, constant, cosine, geometric, linear, listed, profile, staircase


def test_constant() -> None:
    assert constant(3, 5.0) == [5.0, 5.0, 5.0]


def test_listed_wants_one_number_per_layer() -> None:
    assert listed(3, [1, 2, 4]) == [1, 2, 4]
    for values in ([1, 2], [1, 2, 3, 4], []):
        with pytest.raises(ShapeError, match=rf"{len(values)} values listed for 3 layers"):
            listed(3, values)


def test_staircase_fills_up_with_its_last_value() -> None:
    assert staircase(12, [(3, 3), (6, 3), (12, 6)]) == [3] * 3 + [6] * 3 + [12] * 6
    assert staircase(12, [(3, 3), (6, 3), (12, 1)]) == [3] * 3 + [6] * 3 + [12] * 6
    for steps in ([(3, 7), (6, 6)], []):
        with pytest.raises(ShapeError, match=r"does not fit 12 layers"):
            staircase(12, steps)


def test_linear_and_cosine_meet_both_ends_and_the_middle() -> None:
    for shape in (linear, cosine):
        values = shape(5, 1.5, 0.5)
        assert (values[0], values[2], values[4]) == pytest.approx((1.5, 1.0, 0.5))
        assert values == sorted(values, reverse=True)
        assert shape(1, 1.5, 0.5) == [1.5]
    assert linear(5, 1.5, 0.5) == pytest.approx([1.5, 1.25, 1.0, 0.75, 0.5])
    assert cosine(5, 1.5, 0.5)[1] == pytest.approx(1.0 + math.cos(math.pi / 4) / 2)


@pytest.mark.parametrize(("layers", "turn"), [(16, 12), (16, 2), (16, 15), (3, 2), (2000, 1999), (10_000, 2)])
def test_geometric_goes_down_by_one_factor_and_comes_back_by_another(layers: int, turn: int) -> None:
    values = geometric(layers, 0.9, turn)
    assert len(values) == layers
    assert values[0] == values[-1] == 1.0  # to the bit: the two ends must round alike
    assert values[turn - 1] == pytest.approx(0.9 ** (turn - 1))
    if turn < 100:
        assert values[1] / values[0] == pytest.approx(0.9)
        back = [values[n + 1] / values[n] for n in range(turn - 1, layers - 1)]
        assert back == pytest.approx([0.9 ** (-(turn - 1) / (layers - turn))] * len(back))


def test_geometric_without_a_turn_goes_one_way() -> None:
    assert geometric(4, 0.5) == [1.0, 0.5, 0.25, 0.125]
    assert geometric(4, 2.0) == [1.0, 2.0, 4.0, 8.0]
    assert geometric(1, 0.5) == [1.0]


def test_a_profile_is_registered_by_one_decorator() -> None:
    assert {"constant", "listed", "staircase", "geometric", "linear", "cosine"} <= set(PROFILES)
    try:

        @profile("sawtooth")
        def sawtooth(layers: int, period: int) -> list[float]:
            return [float(number % period) for number in range(layers)]

        assert PROFILES["sawtooth"](5, period=2) == [0, 1, 0, 1, 0]
    finally:
        del PROFILES["sawtooth"]
