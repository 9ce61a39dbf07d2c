"""Schedules are total: any combination of lengths gives a share between 0 and 1, and what the settings promise."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entasis.run.config import RunConfig, parse_config
from entasis.run.sections import ScheduleSection
from entasis.train.schedule import learning_rate, rate_share, warm_up_note

Name = Literal["cosine", "constant", "wsd"]
MakeConfig = Callable[..., RunConfig]


def _shares(steps: int, **settings: Any) -> list[float]:
    schedule = ScheduleSection(**settings)
    return [rate_share(schedule, step, steps) for step in range(steps)]


@st.composite
def _schedules(draw: st.DrawFn) -> tuple[ScheduleSection, int]:
    names: list[Name] = ["cosine", "constant", "wsd"]
    name = draw(st.sampled_from(names))
    length = st.integers(0, 40) | st.just(10**9)
    return (
        ScheduleSection(
            name=name,
            warmup_steps=draw(length),
            decay_steps=draw(st.none() | length) if name == "wsd" else None,
            final_ratio=0.1 if name == "constant" else draw(st.floats(0, 1)),
        ),
        draw(st.integers(1, 40)),
    )


@given(_schedules())
def test_total_for_every_combination_of_lengths(case: tuple[ScheduleSection, int]) -> None:
    schedule, steps = case
    shares = [rate_share(schedule, step, steps) for step in range(steps)]
    assert all(math.isfinite(share) and 0 <= share <= 1 for share in shares)
    assert shares[0] > 0 or schedule.final_ratio == 0
    # It rises to one top, then falls or stays.
    top = shares.index(max(shares))
    assert all(before < after for before, after in pairwise(shares[: top + 1]))
    assert all(before >= after for before, after in pairwise(shares[top:]))
    if schedule.warmup_steps < steps:
        falls = schedule.name == "cosine" or (schedule.name == "wsd" and schedule.decay_steps != 0)
        if falls and not (schedule.name == "wsd" and schedule.decay_steps is None and round(0.2 * steps) == 0):
            assert shares[-1] == pytest.approx(schedule.final_ratio, abs=1e-12)
        else:
            assert shares[-1] == 1
    # A function of the step alone, in whatever order it is asked.
    assert [rate_share(schedule, step, steps) for step in reversed(range(steps))] == shares[::-1]
    # A run that goes over its length (it does not) would stay at the end.
    assert rate_share(schedule, steps + 7, steps) == shares[-1]


def test_warm_up_is_linear_and_its_last_update_has_the_full_rate() -> None:
    assert _shares(6, name="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert _shares(3, name="constant", warmup_steps=0) == [1, 1, 1]
    assert _shares(2, name="cosine", warmup_steps=4) == [0.25, 0.5], "cut off by the run's end"
    assert _shares(4, name="wsd", warmup_steps=4) == [0.25, 0.5, 0.75, 1]


def test_cosine_in_numbers() -> None:
    shares = _shares(6, name="cosine", warmup_steps=2, final_ratio=0.1)
    half = math.sqrt(2) / 2
    waves = [(1 + half) / 2, 0.5, (1 - half) / 2, 0]
    assert shares == pytest.approx([0.5, 1, *(0.1 + 0.9 * wave for wave in waves)])
    assert _shares(1, name="cosine", warmup_steps=0, final_ratio=0.1) == pytest.approx([0.1])


def test_wsd_in_numbers() -> None:
    stable = _shares(10, name="wsd", warmup_steps=2, decay_steps=4, final_ratio=0)
    assert stable == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])
    assert _shares(10, name="wsd", warmup_steps=0, final_ratio=0.2) == pytest.approx([1] * 8 + [0.6, 0.2])
    short = _shares(4, name="wsd", warmup_steps=2, decay_steps=100, final_ratio=0)
    assert short == pytest.approx([0.5, 1, 0.5, 0]), "no more steps to fall in than are left"
    assert _shares(4, name="wsd", warmup_steps=0, decay_steps=0) == [1, 1, 1, 1]


def test_a_step_of_a_longer_run_has_its_own_share() -> None:
    schedule = ScheduleSection(name="cosine", warmup_steps=2)
    assert rate_share(schedule, 5, 6) < rate_share(schedule, 5, 60)
    assert rate_share(schedule, 1, 6) == rate_share(schedule, 1, 60) == 1


@pytest.mark.parametrize(
    ("steps", "sequences", "warmup", "peak", "final"),
    [
        (19_080, 128, 1_526, 4.68e-3, 1.12e-3),
        (23_844, 256, 1_908, 5.57e-3, 1.33e-3),
        (23_842, 512, 1_907, 7.53e-3, 1.80e-3),
        (25_000, 1_024, 2_000, 9.90e-3, 2.37e-3),
    ],
)
def test_the_power_schedule_has_the_published_rates(
    steps: int, sequences: int, warmup: int, peak: float, final: float
) -> None:
    """><former at 200M, 500M, 1B and 2B."""
    config = parse_config(
        {
            "data": {"path": "x"},
            "model": {"context": 4096},
            "shape": {"family": "uniform", "layers": 1, "width": 16, "heads": 1},
            "train": {"steps": steps, "batch_tokens": sequences * 4096, "micro_batch": 1},
            "optimizer": {"learning_rate": 0.01},
            "schedule": {"name": "power", "warmup_steps": warmup},
            "out": "x",
        }
    )
    rates = [learning_rate(config, step) for step in range(steps)]
    assert rates[0] == 0
    assert max(rates) == rates[warmup] == pytest.approx(peak, rel=2e-3)
    assert rates[-1] == pytest.approx(final, rel=4e-3)
    assert rates[warmup // 2] == pytest.approx(rates[warmup] / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("steps", "warmup", "name", "reached"),
    [(4, 20, "cosine", "0.0006"), (4, 4, "constant", "0.003"), (1, 3, "wsd", "0.001"), (4, 4, "power", "0.00225")],
)
def test_a_run_within_its_warm_up_says_so(
    steps: int, warmup: int, name: str, reached: str, make_config: MakeConfig
) -> None:
    config = make_config({"train.steps": steps, "schedule": {"name": name, "warmup_steps": warmup}})
    assert warm_up_note(config) == (
        f"schedule.warmup_steps {warmup} is no less than train.steps {steps}: the learning rate only rises, to "
        f"{reached} (optimizer.learning_rate 0.003)"
    )
    longer = make_config({"train.steps": warmup + 1, "schedule": {"name": name, "warmup_steps": warmup}})
    assert warm_up_note(longer) is None
