"""Head schedules: the prism by rule, its controls, and what they are compared with."""

from __future__ import annotations

from typing import Any

import pytest

from entasis.errors import EntasisError
from entasis.shape.budget import budget
from entasis.shape.families import design, family
from entasis.shape.model_config import ModelConfig
from entasis.shape.registry import Design
from entasis.shape.rules import prism_rules

GPT2 = ModelConfig(50_257, 1024, "gpt2")
RULE: dict[str, Any] = {"layers": 12, "width": 768, "heads": 12, "early_head_dim": 256}


def heads_of(made: Design) -> list[int]:
    return [layer.heads for layer in made.shape.layers]


@pytest.mark.parametrize(
    ("settings", "heads"),
    [
        (RULE, [3] * 3 + [6] * 3 + [12] * 6),
        (RULE | {"hold": 2}, [3] * 2 + [6] * 2 + [12] * 8),
        (RULE | {"early_head_dim": 128}, [6] * 3 + [12] * 9),
        (RULE | {"early_head_dim": 128, "hold": 4}, [6] * 4 + [12] * 8),
        (RULE | {"early_head_dim": 64}, [12] * 12),
        ({"layers": 24, "width": 1024, "heads": 16, "early_head_dim": 256, "hold": 4}, [4] * 4 + [8] * 4 + [16] * 16),
        ({"layers": 24, "width": 1536, "heads": 24, "early_head_dim": 256}, [6] * 3 + [12] * 3 + [24] * 18),
        ({"layers": 24, "width": 1536, "heads": 16, "early_head_dim": 256}, [6] * 3 + [12] * 3 + [16] * 18),
        (RULE | {"hold": 4, "baseline_share": 0.25}, [3] * 4 + [6] * 4 + [12] * 4),
        (RULE | {"layers": 20, "early_head_dim": 128, "hold": 9, "baseline_share": 0.55}, [6] * 9 + [12] * 11),
    ],
)
def test_a_prism_by_rule(settings: dict[str, Any], heads: list[int]) -> None:
    made = design("prism", settings)
    assert heads_of(made) == heads
    assert all(layer.heads * layer.head_dim == settings["width"] for layer in made.shape.layers)
    assert not [finding for finding in made.findings if finding.level == "error"]
    assert made.reference == family("uniform", **{name: settings[name] for name in ("layers", "width", "heads")})


def test_the_default_rule_keeps_both_guidelines() -> None:
    for layers in (12, 16, 24, 32):
        made = design("prism", RULE | {"layers": layers})
        assert not prism_rules(made.shape, 12)


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_slicing_changes_no_cost(style: Any) -> None:
    config = ModelConfig(50_257, 1024, style)
    for name, settings in [
        ("prism", RULE),
        ("prism-reversed", RULE),
        ("prism-abrupt", {"layers": 12, "width": 768, "heads": 12, "early_heads": 3, "early_layers": 6}),
        ("all-wide", {"layers": 12, "width": 768, "heads": 12, "wide_heads": 3}),
    ]:
        made = design(name, settings, config)
        assert budget(made.shape, config) == budget(made.reference, config)
        assert made.family == name


def test_a_reversed_prism_is_the_prism_turned_round() -> None:
    for settings in (RULE, {"width": 768, "heads": [3, 3, 6, 6, 12, 12]}):
        forward, backward = design("prism", settings), design("prism-reversed", settings)
        assert backward.shape.layers == forward.shape.layers[::-1]
        assert backward.reference == forward.reference
        assert not [finding for finding in backward.findings if finding.level == "error"]


def test_a_schedule_that_is_turned_round_already_is_not_turned_again() -> None:
    made = design("prism-reversed", {"width": 48, "heads": [4, 4, 2, 2], "baseline_heads": 4})
    found = [finding.message for finding in made.findings if finding.level == "error"]
    assert found[0].startswith("the schedule to be turned round is no prism: layer 3: 2 heads after 4: a prism's head")


def test_controls_that_break_the_guidelines() -> None:
    abrupt = design("prism-abrupt", {"layers": 8, "width": 768, "heads": 12, "early_heads": 3, "early_layers": 5})
    assert heads_of(abrupt) == [3] * 5 + [12] * 3
    assert {layer.heads for layer in abrupt.reference.layers} == {12}
    wide = design("all-wide", {"layers": 8, "width": 768, "heads": 12, "wide_heads": 3})
    assert heads_of(wide) == [3] * 8
    assert {layer.heads for layer in wide.reference.layers} == {12}
    for early_layers in (0, 8):
        settings = {"layers": 8, "width": 768, "heads": 12, "early_heads": 3, "early_layers": early_layers}
        assert len(set(heads_of(design("prism-abrupt", settings)))) == 1


def test_grouped_controls_are_compared_with_a_grouped_column() -> None:
    wide = design("all-wide", {"layers": 4, "width": 768, "heads": 12, "wide_heads": 6, "kv_heads": 3})
    assert {layer.kv_heads for layer in (*wide.shape.layers, *wide.reference.layers)} == {3}
    abrupt = design(
        "prism-abrupt", {"layers": 4, "width": 768, "heads": 12, "early_heads": 6, "early_layers": 4, "kv_heads": 3}
    )
    assert {layer.kv_heads for layer in abrupt.reference.layers} == {3}


@pytest.mark.parametrize(
    ("name", "settings", "line"),
    [
        ("prism", RULE | {"heads": [3, 12]}, r"^heads: with early_head_dim the schedule follows from it"),
        ("prism", {"width": 768, "heads": 12, "early_head_dim": 256}, r"^layers: missing; a prism by rule needs"),
        ("prism", RULE | {"early_head_dim": 32}, r"^early_head_dim: expected at least the baseline's 64, got"),
        ("prism", RULE | {"early_head_dim": 0}, r"^early_head_dim: expected above 0, got 0$"),
        ("prism", RULE | {"early_head_dim": 512}, r"^early_head_dim: heads of 512 do not divide width 768"),
        ("prism", RULE | {"hold": 4}, r"^hold: 2 head dims \(256, 128\) held for 4 layers each leave 4 of 12 layers"),
        ("prism", RULE | {"hold": 0}, r"^hold: expected above 0, got 0$"),
        ("prism", {"width": 768, "heads": [6, 6, 12, 12], "hold": 2}, r"^hold: belongs to a prism by rule"),
        ("prism-reversed", {"width": 48, "heads": [2, 4], "baseline_share": 0.5}, r"^baseline_share: belongs to a"),
        ("prism", RULE | {"hold": 2**31 - 1}, r"^hold: 2 head dims"),
        ("prism", RULE | {"baseline_share": 1.5}, r"^baseline_share: expected from 0 to 1, got 1.5$"),
        ("prism", RULE | {"baseline_share": float("nan")}, r"^baseline_share: expected from 0 to 1, got nan$"),
        ("prism", RULE | {"baseline_heads": 6}, r"^baseline_heads: 6 beside heads 12; with early_head_dim"),
        ("prism", RULE | {"layers": 6, "baseline_share": 0.0}, r"^layer 6: the last layer has 6 heads, the base"),
        ("prism-abrupt", {"layers": 4, "width": 48, "heads": 4, "early_heads": 2, "early_layers": 5},
         r"^early_layers: expected from 0 to 4, got 5$"),
        ("prism-abrupt", {"layers": 4, "width": 48, "heads": 4, "early_heads": 5, "early_layers": 2},
         r"^layer 1: 5 heads do not divide width 48"),
        ("prism-abrupt", {"layers": 4, "width": 48, "heads": 4, "early_heads": 2}, r"^early_layers: missing; family"),
        ("all-wide", {"layers": 4, "width": 48, "heads": 4, "wide_heads": 0}, r"^wide_heads: expected above 0, got 0$"),
        ("all-wide", {"layers": 4, "width": 48, "heads": [4] * 4, "wide_heads": 2}, r"^heads: expected a whole number"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_in_one_line(name: str, settings: dict[str, Any], line: str) -> None:
    with pytest.raises(EntasisError, match=line) as caught:
        family(name, **settings)
    assert "\n" not in str(caught.value)
