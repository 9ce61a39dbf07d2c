"""The statistics of a comparison against scipy, against simulation, and at their edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from entasis.errors import EntasisError
from entasis.report.numbers import nats
from entasis.report.schema import CurvePoint
from entasis.study.statistics import (
    mean,
    mean_curve,
    paired_difference,
    reach,
    sample_sd,
    smallest_detectable,
)

losses = st.floats(0.5, 12.0)


def curve(*points: tuple[int, float]) -> list[CurvePoint]:
    return [CurvePoint(step=step, tokens=step * 100, val_loss=loss) for step, loss in points]


@given(st.lists(st.tuples(losses, losses), min_size=2, max_size=12))
def test_equals_scipy_paired_t_test(rows: list[tuple[float, float]]) -> None:
    values, reference = [row[0] for row in rows], [row[1] for row in rows]
    if float(np.std(np.subtract(values, reference))) < 1e-9:
        return  # scipy itself warns of cancellation there
    expected = stats.ttest_rel(values, reference)
    interval = expected.confidence_interval(0.95)
    result = paired_difference(values, reference)
    assert result["p_value"] == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
    assert result["low"] == pytest.approx(interval.low, rel=1e-6, abs=1e-9)
    assert result["high"] == pytest.approx(interval.high, rel=1e-6, abs=1e-9)


def test_verdicts_follow_the_interval() -> None:
    reference = [3.0, 3.1, 3.2]
    lower = paired_difference([2.90, 3.01, 3.09], reference, name="bowtie", reference_name="uniform")
    assert lower["verdict"] == "lower"
    assert lower["sentence"].startswith("Lower loss: bowtie ends 0.1000 nats per token below uniform (95 % interval")
    higher = paired_difference(reference, [2.90, 3.01, 3.09])
    assert higher["verdict"] == "higher"
    assert "above the reference" in higher["sentence"]
    neither = paired_difference([3.01, 3.08, 3.22], reference)
    assert neither["verdict"] == "no difference shown"
    assert "contains zero" in neither["sentence"]
    assert "could have shown a difference of" in neither["sentence"]
    assert neither["smallest_detectable"] is not None
    assert nats(neither["smallest_detectable"]) in neither["sentence"]


def test_swapping_the_two_mirrors_everything() -> None:
    one, other = [3.0, 3.1, 3.25, 2.9], [3.02, 3.15, 3.2, 2.95]
    forward, backward = paired_difference(one, other), paired_difference(other, one)
    assert forward["mean"] == -backward["mean"]
    assert forward["low"] is not None
    assert forward["low"] == -(backward["high"] or math.nan)
    assert forward["p_value"] == backward["p_value"]
    assert forward["smallest_detectable"] == backward["smallest_detectable"]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_identical_runs_give_exactly_zero(count: int) -> None:
    result = paired_difference([3.1, 2.7, 3.3, 3.0, 2.9][:count], [3.1, 2.7, 3.3, 3.0, 2.9][:count])
    assert result["pairs"] == [0.0] * count
    assert result["mean"] == 0.0
    assert result["verdict"] == "identical"
    assert (result["low"], result["high"]) == ((0.0, 0.0) if count > 1 else (None, None))
    assert result["p_value"] is None
    assert result["smallest_detectable"] is None


def test_one_seed_shows_nothing() -> None:
    result = paired_difference([2.9], [3.0])
    assert result["verdict"] == "one seed"
    assert result["mean"] == pytest.approx(-0.1)
    assert [result["low"], result["high"], result["p_value"], result["smallest_detectable"]] == [None] * 4
    assert "no difference is shown" in result["sentence"]


def test_equal_nonzero_differences_claim_nothing() -> None:
    # In binary the three differences are 0.1 up to rounding; a t-test would call this certain.
    result = paired_difference([3.1, 2.6, 4.1], [3.0, 2.5, 4.0])
    assert result["verdict"] == "no difference shown"
    assert result["mean"] == pytest.approx(0.1)
    assert [result["low"], result["high"], result["p_value"], result["smallest_detectable"]] == [None] * 4
    assert "Without any spread between the seeds" in result["sentence"]


def test_small_but_real_spread_is_not_mistaken_for_rounding() -> None:
    assert paired_difference([3.1, 2.6, 4.1000001], [3.0, 2.5, 4.0])["verdict"] == "higher"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_refuses_losses_that_are_not_finite(bad: float) -> None:
    for values, reference in (([3.0, bad], [3.0, 3.1]), ([3.0, 3.1], [bad, 3.0])):
        with pytest.raises(EntasisError, match=r"^paired difference, .*only finite losses") as caught:
            paired_difference(values, reference)
        assert "\n" not in str(caught.value)
    with pytest.raises(EntasisError, match="only finite"):
        reach(curve((10, bad)), 3.0, total_steps=10, flops_per_step=1.0, reference_flops=10.0)
    with pytest.raises(EntasisError, match="only finite"):
        mean_curve([curve((10, bad))])


def test_refuses_what_is_no_pairing() -> None:
    with pytest.raises(EntasisError, match="2 losses of bowtie against 1"):
        paired_difference([3.0, 3.1], [3.0], name="bowtie")
    with pytest.raises(EntasisError, match="no value"):
        paired_difference([], [])


@pytest.mark.parametrize("pairs", [2, 3, 4, 5, 8, 20, 200])
def test_smallest_detectable_has_exactly_the_promised_power(pairs: int) -> None:
    """Power by integrating over the distribution of the sample sd, without the noncentral t."""
    noncentrality, freedom = smallest_detectable(1.0, pairs) * math.sqrt(pairs), pairs - 1
    critical = float(stats.t.ppf(0.975, freedom))

    def rejected(chi: float) -> float:
        bound = critical * chi / math.sqrt(freedom)
        tails = stats.norm.sf(bound - noncentrality) + stats.norm.cdf(-bound - noncentrality)
        return float(stats.chi.pdf(chi, freedom) * tails)

    centre = math.sqrt(freedom)
    power, _ = integrate.quad(rejected, max(0.0, centre - 12), centre + 12, limit=500, points=[centre])
    assert power == pytest.approx(0.8, abs=1e-6)


def test_smallest_detectable_in_simulation() -> None:
    draws = np.random.default_rng(0).normal(smallest_detectable(0.02, 3), 0.02, size=(40_000, 3))
    rejected = stats.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.05
    assert float(np.mean(rejected)) == pytest.approx(0.8, abs=0.01)


def test_few_seeds_cost_more_than_the_normal_approximation_says() -> None:
    normal = (1.959964 + 0.841621) / math.sqrt(3)
    assert smallest_detectable(1.0, 3) > 1.9 * normal
    assert smallest_detectable(1.0, 1000) == pytest.approx((1.959964 + 0.841621) / math.sqrt(1000), rel=0.01)
    assert smallest_detectable(0.5, 3) == pytest.approx(0.5 * smallest_detectable(1.0, 3))


def test_reach_interpolates_between_evaluations() -> None:
    falling = curve((0, 6.0), (100, 4.0), (200, 3.0), (300, 2.8))
    result = reach(falling, 3.25, total_steps=300, flops_per_step=2.0, reference_flops=1200.0)
    assert result["steps"] == pytest.approx(175.0)
    assert result["flops"] == pytest.approx(350.0)
    assert result["steps_ratio"] == pytest.approx(175 / 300)
    assert result["flops_ratio"] == pytest.approx(350 / 1200)


def test_reach_counts_the_first_crossing_and_exact_hits() -> None:
    def steps(target: float, *points: tuple[int, float]) -> float | None:
        return reach(curve(*points), target, total_steps=300, flops_per_step=1.0, reference_flops=1.0)["steps"]

    assert steps(3.0, (100, 4.0), (200, 3.0), (300, 3.5)) == 200.0
    assert steps(3.5, (100, 4.0), (200, 3.0), (300, 3.6)) == 150.0
    assert steps(4.0, (100, 4.0), (200, 3.0)) == 100.0
    assert steps(5.0, (100, 4.0), (200, 3.0)) == 100.0
    assert steps(2.9, (100, 4.0), (200, 3.0)) is None


def test_the_reference_reaches_its_own_final_loss_at_its_last_step() -> None:
    curves = [curve((100, 4.1 + seed / 7), (200, 3.1 + seed / 7), (300, 2.9 + seed / 7)) for seed in range(3)]
    target = mean([points[-1]["val_loss"] for points in curves])
    result = reach(mean_curve(curves), target, total_steps=300, flops_per_step=2.0, reference_flops=600.0)
    assert (result["steps"], result["steps_ratio"], result["flops_ratio"]) == (300.0, 1.0, 1.0)


def test_reach_refuses_steps_that_do_not_rise() -> None:
    with pytest.raises(EntasisError, match="step 100 follows step 100"):
        reach(curve((100, 4.0), (100, 3.0)), 2.0, total_steps=1, flops_per_step=1.0, reference_flops=1.0)
    with pytest.raises(EntasisError, match="no evaluation"):
        reach([], 2.0, total_steps=1, flops_per_step=1.0, reference_flops=1.0)


def test_mean_curve_and_spread() -> None:
    assert mean_curve([curve((10, 4.0), (20, 3.0)), curve((10, 5.0), (20, 3.5))]) == curve((10, 4.5), (20, 3.25))
    with pytest.raises(EntasisError, match="curve 2 was evaluated at other steps"):
        mean_curve([curve((10, 4.0)), curve((20, 4.0))])
    assert sample_sd([3.0]) is None
    assert sample_sd([3.0, 4.0, 8.0]) == pytest.approx(float(np.std([3.0, 4.0, 8.0], ddof=1)))
