"""Widths, head dims and MLPs, each in its own multiples: all sizes obey them, and no other scale matches better."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entasis.errors import ConfigError, ShapeError
from entasis.shape import chains
from entasis.shape.budget import budget
from entasis.shape.families import design, family_settings
from entasis.shape.match import MATCH_FIELDS, matched
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import Shape

CONFIG = ModelConfig(1021, 256)
OWN: dict[str, dict[str, Any]] = {
    "bowtie": {"bottleneck": 0.4},
    "diamond": {"peak": 1.3},
    "growing": {"last": 1.3},
    "narrowing": {"last": 0.5},
    "prism-bowtie": {"early_head_dim": 96, "hold": 2, "bottleneck": 0.5},
    "half-first": {},
}


@pytest.mark.parametrize("name", OWN)
@settings(max_examples=25, deadline=None)
@given(
    layers=st.integers(4, 12),
    heads=st.sampled_from([4, 6, 8]),
    head_dim=st.sampled_from([36, 48, 64]),
    multiple=st.sampled_from([8, 24, 32]),
    head_dim_multiple=st.sampled_from([2, 8, 16]),
    mlp_multiple=st.sampled_from([1, 8, 32, 100]),
    by=st.sampled_from(list(MATCH_FIELDS)),
)
def test_all_sizes_obey_their_multiples(
    name: str, layers: int, heads: int, head_dim: int, by: str, **steps: int
) -> None:
    asked = {"layers": layers, "width": heads * head_dim, "heads": heads, "match": by}
    made = design(name, {**asked, **OWN[name], **steps}, CONFIG)
    assert not [finding for finding in made.findings if finding.level == "error"]
    for layer in made.shape.layers:
        assert layer.width % steps["multiple"] == 0
        assert layer.head_dim % steps["head_dim_multiple"] == 0
        assert layer.mlp_hidden % steps["mlp_multiple"] == 0
    column = made.reference.layers[0]
    assert (column.width, column.heads, column.head_dim) == (heads * head_dim, heads, head_dim)
    assert column.mlp_hidden == 4 * column.width, "what it is measured against is as it is"


@pytest.mark.parametrize("by", MATCH_FIELDS)
def test_no_scale_matches_better(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Callable[[float], Shape]] = []

    def spy(build: Callable[[float], Shape], *rest: Any) -> Shape:
        seen.append(build)
        return matched(build, *rest)

    monkeypatch.setattr(chains, "matched", spy)
    made = design("bowtie", {"layers": 8, "width": 384, "heads": 6, "match": by, "multiple": 32, "head_dim_multiple": 8,
                             "mlp_multiple": 64}, CONFIG)  # fmt: skip

    def gap(shape: Shape) -> int:
        field = MATCH_FIELDS[by]
        return abs(int(getattr(budget(shape, CONFIG), field)) - int(getattr(budget(made.reference, CONFIG), field)))

    (build,) = seen
    best = min((build(0.5 + 0.002 * step) for step in range(600)), key=gap)
    assert gap(made.shape) <= gap(best)


def test_experts_obey_it_too() -> None:
    made = design("bowtie", {"layers": 8, "width": 256, "heads": 4, "experts": 4, "experts_per_token": 2,
                             "expert_hidden": 200, "mlp_multiple": 16}, CONFIG)  # fmt: skip
    assert all(layer.mlp_hidden % 16 == 0 for layer in made.shape.layers)
    assert len({layer.mlp_hidden for layer in made.shape.layers}) > 1


@pytest.mark.parametrize("name", OWN)
def test_without_them_nothing_changes(name: str) -> None:
    asked = {"layers": 8, "width": 384, "heads": 6, **OWN[name]}
    plain = design(name, asked, CONFIG)
    assert design(name, {**asked, "mlp_multiple": 1, "head_dim_multiple": None}, CONFIG) == plain
    assert {"multiple", "head_dim_multiple", "mlp_multiple"} <= set(family_settings(name))


@pytest.mark.parametrize(
    ("given_settings", "line"),
    [
        ({"head_dim_multiple": 0}, "head_dim_multiple: expected above 0, got 0"),
        ({"mlp_multiple": -8}, "mlp_multiple: expected above 0, got -8"),
        ({"mlp_multiple": 2.5}, "mlp_multiple: expected a whole number"),
        ({"head_dim": 48, "head_dim_multiple": 32}, "head_dim: 48 is no multiple of 32"),
        ({"mlp_hidden": 1000, "mlp_multiple": 64}, "mlp_hidden: 1000 is no multiple of 64"),
        ({"head_dim_multiple": 4096}, "match: effective cannot be matched: this shape has at least"),
        ({"mlp_multiple": 65536}, "match: effective cannot be matched: this shape has at least"),
    ],
)
def test_what_is_impossible_is_one_line(given_settings: dict[str, Any], line: str) -> None:
    with pytest.raises((ConfigError, ShapeError), match=f"^{line}") as error:
        design("bowtie", {"layers": 8, "width": 384, "heads": 6, **given_settings}, CONFIG)
    assert "\n" not in str(error.value)
