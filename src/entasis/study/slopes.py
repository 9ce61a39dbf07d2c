"""How a size goes with width: a power law fitted for each seed, and what the slopes of the seeds together show."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy import stats

from entasis.report.scaling_schema import Slope
from entasis.study.statistics import CONFIDENCE, mean, sample_sd


def slope(widths: Sequence[int], sizes: Sequence[Sequence[float]], tolerance: float) -> Slope:
    """The exponent of size against width, with its interval over seeds, and whether it is flat within the tolerance.

    Seeds are independent, points of one seed are not (they share batches): so each seed gives one slope, by least
    squares in logarithms, and the interval is the t interval of their mean.

    Args:
        widths: one per rung.
        sizes: rung by rung, one per seed.
        tolerance: largest slope that counts as flat.
    """
    if len(set(widths)) < 2 or any(not size > 0 for rung in sizes for size in rung):
        return Slope(by_seed=[], mean=None, low=None, high=None, verdict="no slope")
    logs = [math.log(width) for width in widths]
    by_seed = [
        float(stats.linregress(logs, [math.log(size) for size in seed]).slope) for seed in zip(*sizes, strict=True)
    ]
    result = Slope(by_seed=by_seed, mean=mean(by_seed), low=None, high=None, verdict="one seed")
    sd = sample_sd(by_seed)
    if sd is not None:
        margin = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(by_seed) - 1)) * sd / math.sqrt(len(by_seed))
        low, high = mean(by_seed) - margin, mean(by_seed) + margin
        result["low"], result["high"] = low, high
        result["verdict"] = (
            "flat"
            if -tolerance <= low and high <= tolerance
            else "grows"
            if low > tolerance
            else "shrinks"
            if high < -tolerance
            else "undecided"
        )
    return result
