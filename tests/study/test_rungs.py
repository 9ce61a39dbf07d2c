"""Rungs of a ladder: what follows the width and what stays; and slopes against it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from entasis.errors import ConfigError
from entasis.run.config import RunConfig
from entasis.study.rungs import require_ladder, rung
from entasis.study.slopes import slope

MakeConfig = Callable[..., RunConfig]

_UNIFORM = {"family": "uniform", "layers": 2, "width": 32, "heads": 4}


def test_heads_stay_and_head_dims_grow(make_config: MakeConfig) -> None:
    made = rung(make_config({"shape": _UNIFORM}), 64)
    layer = made.design(97).shape.layers[0]
    assert (layer.width, layer.heads, layer.head_dim, layer.mlp_hidden) == (64, 4, 16, 256)


def test_units_that_are_given_as_numbers_follow_the_width_and_a_given_head_dim_stays(make_config: MakeConfig) -> None:
    shape = {"family": "bowtie", "layers": 4, "width": 32, "heads": 4, "multiple": 8, "head_dim": 8}
    made = rung(make_config({"shape": {**shape, "mlp_hidden": 48}}), 96)
    assert made.shape["mlp_hidden"] == 144
    layers = made.design(97).shape.layers
    assert {layer.head_dim for layer in layers} == {8}
    assert layers[0].heads > 12 > layers[2].heads
    experts = {"experts": 4, "experts_per_token": 2, "expert_hidden": 10}
    assert rung(make_config({"shape": {**_UNIFORM, **experts}}), 16).shape["expert_hidden"] == 5


def test_the_multipliers_follow_the_width_only_where_asked(make_config: MakeConfig) -> None:
    config = make_config({"shape": _UNIFORM, "model.logit_divisor": 8.0, "optimizer.block_rate": 0.125})
    as_published, tied = rung(config, 64), rung(config, 64, base_width=32)
    assert (as_published.model.logit_divisor, as_published.optimizer.block_rate) == (8.0, 0.125)
    assert (tied.model.logit_divisor, tied.optimizer.block_rate) == (16.0, 0.0625)
    assert rung(config, 32, base_width=32) == rung(config, 32)


@pytest.mark.parametrize(
    ("shape", "width", "message"),
    [
        ({"family": "explicit", "embed_width": 8, "layers": [{"width": 8}]}, 16, "family explicit has no setting"),
        (_UNIFORM, 34, "width 34: shape: layer 1: 4 heads do not divide"),
    ],
)
def test_what_makes_no_rung_is_one_line(
    make_config: MakeConfig, shape: dict[str, Any], width: int, message: str
) -> None:
    config = make_config() if shape["family"] == "explicit" else make_config({"shape": shape})
    with pytest.raises(ConfigError, match=message) as caught:
        rung(config, width)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("widths", [[], [8], [16, 8], [8, 8], [0, 8]])
def test_a_ladder_rises(widths: list[int]) -> None:
    with pytest.raises(ConfigError, match="two widths or more, rising"):
        require_ladder("--widths", widths)
    require_ladder("--widths", [8, 16])


def _sizes(widths: list[int], *exponents: float) -> list[list[float]]:
    return [[0.3 * width**exponent for exponent in exponents] for width in widths]


def test_a_power_law_is_found_for_each_seed_and_the_interval_is_of_their_mean() -> None:
    widths = [16, 48, 64]
    found = slope(widths, _sizes(widths, 0.5, 0.6, 0.7), tolerance=0.1)
    assert found["by_seed"] == pytest.approx([0.5, 0.6, 0.7])
    assert found["mean"] == pytest.approx(0.6)
    # sd 0.1, three seeds: t(0.975, 2) = 4.3027 times 0.1 / sqrt(3)
    assert found["low"] == pytest.approx(0.6 - 0.24841, abs=1e-4)
    assert found["high"] == pytest.approx(0.6 + 0.24841, abs=1e-4)


@pytest.mark.parametrize(
    ("exponents", "tolerance", "verdict"),
    [
        ((0.0, 0.01, -0.01), 0.1, "flat"),
        ((0.5, 0.51, 0.49), 0.1, "grows"),
        ((-0.5, -0.51, -0.49), 0.1, "shrinks"),
        ((0.09, 0.1, 0.11), 0.1, "undecided"),
        ((0.09, 0.1, 0.11), 0.2, "flat"),
        ((-0.5, 0.0, 0.5), 0.1, "undecided"),
        ((0.5,), 0.1, "one seed"),
    ],
)
def test_the_whole_interval_decides(exponents: tuple[float, ...], tolerance: float, verdict: str) -> None:
    assert slope([8, 16, 32], _sizes([8, 16, 32], *exponents), tolerance)["verdict"] == verdict


def test_zero_sizes_and_a_single_width_have_no_slope() -> None:
    assert slope([8, 16], [[0.0], [1.0]], 0.1)["verdict"] == "no slope"
    assert slope([8, 8], [[0.5], [1.0]], 0.1) == {
        "by_seed": [], "mean": None, "low": None, "high": None, "verdict": "no slope"
    }  # fmt: skip
