"""Everything of a kind, against brute force: prism schedules with and without guidelines, grids of bowties."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from entasis.errors import ConfigError, ShapeError
from entasis.shape.enumerate import bowtie_grid, prism_schedules
from entasis.shape.families import bowtie, design
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape
from entasis.shape.rules import prism_rules

CONFIG = ModelConfig(97, 64, "llama")
CANDIDATES = [(2, 2, 8), (2, 3, 7), (3, 2, 7), (2, 4, 6), (3, 3, 6), (4, 2, 6)]
"""Layers with 3, 6 and 12 heads of a prism of 12 layers and width 768, under every rule that is published."""


def runs(schedule: Sequence[int]) -> list[tuple[int, int]]:
    return [(heads, len(list(group))) for heads, group in itertools.groupby(schedule)]


def by_brute_force(
    width: int, layers: int, baseline: int, head_dims: Sequence[int] | None, guidelines: bool
) -> list[tuple[int, ...]]:
    """Every combination of head counts, filtered by the rules in words: each divides the width; counts never fall; the
    last one is the baseline's. Guidelines: half of the layers at the baseline, every other count for 2 to 4 layers."""
    counts = [heads for heads in range(1, width + 1) if width % heads == 0]
    if head_dims is not None:
        counts = [heads for heads in counts if heads == baseline or width // heads in head_dims]
    kept = []
    for schedule in itertools.product(counts, repeat=layers):
        if schedule[-1] != baseline or any(after < before for before, after in itertools.pairwise(schedule)):
            continue
        if guidelines:
            if 2 * schedule.count(baseline) < layers:
                continue
            if any(heads != baseline and not 2 <= hold <= 4 for heads, hold in runs(schedule)):
                continue
        kept.append(schedule)
    return kept


@pytest.mark.parametrize("guidelines", [True, False])
@pytest.mark.parametrize(
    ("width", "layers", "baseline", "head_dims"),
    [
        (48, 1, 4, None),
        (48, 2, 4, None),
        (48, 5, 4, None),
        (48, 6, 48, [24, 12]),
        (12, 6, 6, None),
        (16, 7, 8, [16, 8, 2]),
        (16, 8, 4, None),
        (36, 8, 9, [12, 36, 4]),
        (64, 10, 8, [32, 64]),
        (64, 6, 1, None),
        (30, 6, 6, []),
        (30, 6, 6, [7, 5]),
        (7, 6, 7, None),
    ],
)
def test_schedules_are_those_of_brute_force(
    width: int, layers: int, baseline: int, head_dims: list[int] | None, guidelines: bool
) -> None:
    found = list(
        prism_schedules(width=width, layers=layers, baseline_heads=baseline, head_dims=head_dims, guidelines=guidelines)
    )
    assert found == by_brute_force(width, layers, baseline, head_dims, guidelines)  # in the same order, too
    assert len(set(found)) == len(found)
    for schedule in found:
        shape = Shape(tuple(LayerShape(width, heads, heads, width // heads, 8) for heads in schedule), width)
        said = prism_rules(shape, baseline)
        assert not [finding for finding in said if finding.level == "error"]
        if guidelines:
            assert not said


def test_the_candidates_for_twelve_layers_are_all_there_and_nothing_else() -> None:
    found = list(prism_schedules(width=768, layers=12, baseline_heads=12, head_dims=[256, 128]))
    full = {schedule for schedule in found if len(set(schedule)) == 3}
    assert full == {(3,) * a + (6,) * b + (12,) * c for a, b, c in CANDIDATES}
    assert all(schedule.count(12) >= 6 for schedule in found)
    assert (12,) * 12 in found
    wider = set(prism_schedules(width=768, layers=12, baseline_heads=12))
    assert set(found) < wider


def test_schedules_come_one_by_one() -> None:
    """Without guidelines there are very many; nobody has to wait for all of them."""
    endless = prism_schedules(width=1536, layers=24, baseline_heads=1536, guidelines=False)
    assert len(list(itertools.islice(endless, 1000))) == 1000


@pytest.mark.parametrize(
    ("settings", "error", "line"),
    [
        ({"layers": 0}, ConfigError, r"^layers: expected from 1"),
        ({"baseline_heads": 0}, ConfigError, r"^baseline_heads: expected above 0"),
        ({"width": -1}, ConfigError, r"^width: expected above 0"),
        ({"baseline_heads": 5}, ShapeError, r"^baseline_heads: 5 heads do not divide width 48"),
    ],
)
def test_nonsense_has_no_schedules(settings: dict[str, Any], error: type[Exception], line: str) -> None:
    with pytest.raises(error, match=line):
        list(prism_schedules(**({"width": 48, "layers": 4, "baseline_heads": 4} | settings)))


def test_a_grid_holds_every_bowtie_or_the_reason_why_there_is_none() -> None:
    settings = {"layers": 8, "width": 256, "heads": 8}
    bottlenecks, turns = [0.01, 0.3, 0.7], [2, 5, 7]
    points = list(bowtie_grid(settings, bottlenecks, turns, CONFIG))
    assert [(point.bottleneck, point.turn) for point in points] == list(itertools.product(bottlenecks, turns))
    for point in points:
        if point.bottleneck == 0.01:
            assert point.design is None
            assert point.reason.startswith(f"layer {point.turn}: width ")
        else:
            assert point.design == design(
                "bowtie", settings | {"bottleneck": point.bottleneck, "turn": point.turn}, CONFIG
            )
            assert point.design is not None
            assert point.design.shape == bowtie(
                layers=8, width=256, heads=8, bottleneck=point.bottleneck, turn=point.turn, config=CONFIG
            )
            assert point.reason == ""


@pytest.mark.parametrize(
    ("settings", "bottlenecks", "turns", "line"),
    [
        ({"layers": 8}, [0.3], [3], r"^width: missing"),
        ({"layers": 8, "width": 256, "heads": 8}, [1.5], [3], r"^bottleneck: expected above 0"),
        ({"layers": 8, "width": 256, "heads": 8}, [0.3], [3, 8], r"^turn: expected a layer from 2 to 7 of 8, got 8"),
        ({"layers": 8, "width": 256, "heads": 8}, ["x"], [3], r"^bottleneck: "),
    ],
)
def test_wrong_settings_of_a_grid_are_errors(
    settings: dict[str, Any], bottlenecks: list[Any], turns: list[int], line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        list(bowtie_grid(settings, bottlenecks, turns, CONFIG))
