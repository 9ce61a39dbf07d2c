"""All shapes of a kind: every Prism schedule under its constraints, every bowtie of a grid of waists and turns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entasis.errors import ShapeError
from entasis.shape.families import design
from entasis.shape.model_config import ModelConfig
from entasis.shape.registry import Design, require_depth, require_positive
from entasis.shape.rules import BASELINE_SHARE, HOLD_LAYERS, divisors


def prism_schedules(
    *, width: int, layers: int, baseline_heads: int, head_dims: Sequence[int] | None = None, guidelines: bool = True
) -> Iterator[tuple[int, ...]]:
    """Every head schedule of a prism, in order of its head counts.

    Constraints: each count divides `width`, counts never fall, the last layer has `baseline_heads`. Guidelines: a head
    dim below the baseline's place is held for 2 to 4 layers, and at least half of the layers keep the baseline.

    Args:
        width: residual width.
        layers: length of a schedule.
        baseline_heads: heads of the last layer.
        head_dims: only these head dims, beside the baseline's; None: every divisor.
        guidelines: whether the guidelines are kept too.

    Raises:
        ConfigError: a size is out of range.
        ShapeError: the baseline's heads do not divide the width.
    """
    require_depth(layers)
    require_positive(width=width, baseline_heads=baseline_heads)
    if width % baseline_heads:
        raise ShapeError(f"baseline_heads: {baseline_heads} heads do not divide width {width}")
    counts = sorted(count for count in divisors(width) if count < baseline_heads)
    if head_dims is not None:
        counts = [count for count in counts if width // count in head_dims]
    least = math.ceil(BASELINE_SHARE * layers) if guidelines else 1
    holds = range(HOLD_LAYERS[0], HOLD_LAYERS[1] + 1) if guidelines else range(1, layers)

    def early(first: int, room: int) -> Iterator[tuple[int, ...]]:
        """Schedules of counts[first:] in at most `room` layers, the empty one last."""
        for index in range(first, len(counts)):
            for hold in reversed(holds):
                if hold <= room:
                    for rest in early(index + 1, room - hold):
                        yield (counts[index],) * hold + rest
        yield ()

    for schedule in early(0, layers - least):
        yield schedule + (baseline_heads,) * (layers - len(schedule))


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One bowtie of a grid."""

    bottleneck: float
    turn: int
    design: Design | None
    """None: there is no such bowtie."""
    reason: str = ""
    """Why there is none."""


def bowtie_grid(
    settings: Mapping[str, Any], bottlenecks: Sequence[float], turns: Sequence[int], config: ModelConfig
) -> Iterator[GridPoint]:
    """The bowties of `settings` at every bottleneck and turning layer.

    Raises:
        ConfigError: a setting is wrong.
    """
    for bottleneck in bottlenecks:
        for turn in turns:
            try:
                made = design("bowtie", {**settings, "bottleneck": bottleneck, "turn": turn}, config)
            except ShapeError as error:
                yield GridPoint(bottleneck, turn, None, str(error))
            else:
                yield GridPoint(bottleneck, turn, made)
