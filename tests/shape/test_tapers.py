"""Constant width, changing MLPs and heads: OpenELM's published shapes, tapers, crown, frame, reverse."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from entasis.errors import EntasisError
from entasis.shape.budget import budget
from entasis.shape.families import design, family
from entasis.shape.model_config import ModelConfig
from entasis.shape.profiles import PROFILES, profile

CONFIG = ModelConfig(50_257, 1024, "llama")
BASE: dict[str, Any] = {"layers": 12, "width": 768, "heads": 12}


def runs(values: list[int]) -> list[tuple[int, int]]:
    """(value, how many times in a row)."""
    return [(value, len(list(group))) for value, group in itertools.groupby(values)]


# --- OpenELM ----------------------------------------------------------------------------------------------------------


def test_openelm_270m_is_the_published_shape() -> None:
    made = design("openelm", {"layers": 16, "width": 1280})
    layers = made.shape.layers
    assert runs([layer.heads for layer in layers]) == [(12, 5), (16, 7), (20, 4)]
    assert runs([layer.kv_heads for layer in layers]) == [(3, 5), (4, 7), (5, 4)]
    assert [layer.mlp_hidden for layer in layers] == [
        768, 1024, 1280, 1536, 1792, 2048, 2560, 2816, 3072, 3328, 3584, 3840, 4352, 4608, 4864, 5120,
    ]  # fmt: skip
    assert {(layer.width, layer.head_dim) for layer in layers} == {(1280, 64)}
    assert (made.shape.embed_width, made.shape.head_width) == (1280, 1280)
    assert not [finding for finding in made.findings if finding.level == "error"]
    assert runs([layer.heads for layer in made.reference.layers]) == [(20, 16)]


@pytest.mark.parametrize(
    ("layers", "width", "head_dim", "first", "last"), [(28, 2048, 64, 16, 32), (36, 3072, 128, 12, 24)]
)
def test_larger_openelms_have_the_published_heads(
    layers: int, width: int, head_dim: int, first: int, last: int
) -> None:
    shape = family("openelm", layers=layers, width=width, head_dim=head_dim)
    heads = [layer.heads for layer in shape.layers]
    assert (heads[0], heads[-1]) == (first, last)
    assert heads == sorted(heads)
    assert all(layer.heads == 4 * layer.kv_heads for layer in shape.layers)
    assert all(layer.mlp_hidden % 256 == 0 for layer in shape.layers)
    hidden = [layer.mlp_hidden / width for layer in shape.layers]
    assert hidden == sorted(hidden)
    assert hidden[0] == pytest.approx(0.5, abs=128 / width)
    assert hidden[-1] == 4


def test_openelm_is_matched_when_asked() -> None:
    free = design("openelm", {"layers": 16, "width": 1280}, CONFIG)
    equal = design("openelm", {"layers": 16, "width": 1280, "match": "effective"}, CONFIG)
    assert budget(free.shape, CONFIG).effective_parameters < 0.8 * budget(free.reference, CONFIG).effective_parameters
    target = budget(equal.reference, CONFIG).effective_parameters
    assert budget(equal.shape, CONFIG).effective_parameters == pytest.approx(target, rel=0.01)
    assert [layer.heads for layer in equal.shape.layers] == [layer.heads for layer in free.shape.layers]


# --- tapered ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curve", ["cosine", "linear", "sigmoid"])
def test_tapers_fall_from_one_and_a_half_to_a_half_of_the_usual_mlp(curve: str) -> None:
    made = design("tapered", BASE | {"curve": curve})
    hidden = [layer.mlp_hidden for layer in made.shape.layers]
    assert (hidden[0], hidden[-1]) == (4608, 1536)
    assert hidden == sorted(hidden, reverse=True)
    assert all(units % 8 == 0 for units in hidden)
    assert {(layer.width, layer.heads, layer.head_dim) for layer in made.shape.layers} == {(768, 12, 64)}
    assert made.reference == family("uniform", **BASE)
    assert sum(hidden) == pytest.approx(12 * 3072, abs=12 * 8 / 2)


def test_the_curves_differ_as_they_should() -> None:
    def hidden(curve: str) -> list[int]:
        return [layer.mlp_hidden for layer in family("tapered", **BASE, curve=curve).layers]

    linear, cosine, sigmoid = hidden("linear"), hidden("cosine"), hidden("sigmoid")
    steps = [before - after for before, after in itertools.pairwise(linear)]
    assert max(steps) - min(steps) <= 8
    for early in (1, 2, 3):  # flat at both ends, steeper in the middle; the sigmoid more so
        assert linear[early] < cosine[early] < sigmoid[early]
    index = 1
    wanted = 3072 * (1.0 + 0.5 * math.cos(math.pi * index / 11))
    assert abs(cosine[index] - wanted) <= 8


def test_a_reversed_taper_is_one_setting() -> None:
    made = family("tapered", **BASE, first=0.5, last=1.5)
    assert [layer.mlp_hidden for layer in made.layers] == [
        layer.mlp_hidden for layer in family("tapered", **BASE).layers[::-1]
    ]


def test_a_taper_can_follow_a_profile_from_outside() -> None:
    try:

        @profile("bent")
        def bent(layers: int, first: float, last: float, knee: float = 0.5) -> list[float]:
            return [first if number < knee * layers else last for number in range(layers)]

        hidden = [layer.mlp_hidden for layer in family("tapered", **BASE, curve="bent").layers]
        assert runs(hidden) == [(4608, 6), (1536, 6)]

        @profile("short")
        def short(layers: int, first: float, last: float) -> list[float]:
            return [first, last]

        with pytest.raises(
            EntasisError, match=r"^curve: profile short does not give 12 numbers above 0: \[1.5, 0.5\]$"
        ):
            family("tapered", **BASE, curve="short")
    finally:
        PROFILES.pop("bent", None)
        PROFILES.pop("short", None)


# --- crown, frame, reverse --------------------------------------------------------------------------------------------


def test_crown_frame_and_reverse_scale_heads_and_mlp_together() -> None:
    crown, frame, reverse = (design(name, BASE | {"heads": 16}) for name in ("crown", "frame", "reverse"))
    for made in (crown, frame, reverse):
        assert {(layer.head_dim, layer.kv_heads) for layer in made.shape.layers} == {(48, 4)}
        assert {layer.heads for layer in made.reference.layers} == {16}
        assert {layer.kv_heads for layer in made.reference.layers} == {4}
        assert all(layer.heads % 4 == 0 for layer in made.shape.layers)
    for made, larger in ((crown, "middle"), (frame, "ends")):
        layers = made.shape.layers
        assert layers == layers[::-1]
        half = [(layer.heads, layer.mlp_hidden) for layer in layers[:6]]
        assert half == sorted(half, reverse=larger == "ends")
        assert half[0] != half[-1]
    falling = [(layer.heads, layer.mlp_hidden) for layer in reverse.shape.layers]
    assert falling == sorted(falling, reverse=True)
    assert (falling[0][0], falling[-1][0]) == (24, 8)
    assert [layer.heads for layer in frame.shape.layers][::11] == [24, 24]


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        (
            "tapered",
            {"curve": "cosin"},
            r"^curve: unknown profile 'cosin' \(did you mean 'cosine'\?\); from a first to a ",
        ),
        ("tapered", {"curve": "constant"}, r"^curve: unknown profile 'constant'"),
        ("tapered", {"curve": 3}, r"^curve: expected a valid string; got 3"),
        ("tapered", {"first": 0.0}, r"^first: expected above 0, got 0.0$"),
        ("tapered", {"last": float("inf")}, r"^last: expected at most"),
        ("tapered", {"heads": 7}, r"^layer 1: 7 heads do not divide width 768"),
        ("tapered", {"mlp_multiple": 0}, r"^mlp_multiple: expected above 0, got 0$"),
        ("crown", {"layers": 2}, r"^layers: expected from 3 to 10000 in a crown, got 2$"),
        ("reverse", {"layers": 1}, r"^layers: expected from 2 to 10000 in a reverse, got 1$"),
        ("frame", {"middle": 0.0}, r"^frame: multipliers are above 0, got 0.0$"),
        ("crown", {"heads": 7}, r"^7 heads do not divide width 768, so there is no head dim"),
        ("crown", {"kv_heads": 5}, r"^kv_heads: 5 do not divide 12 heads into groups$"),
        (
            "crown",
            {"ends": 9.0, "middle": 9.0},
            r"^match: effective cannot be matched: this shape has at least [\d,]+, u",
        ),
    ],
)
def test_nonsense_is_refused_in_one_line(name: str, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(EntasisError, match=line) as caught:
        family(name, **(BASE | changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"match": "kv"},
            r"^match: kv does not grow with what this family scales: [\d,]+, uniform [\d,]+; match by anot",
        ),
        (
            {"match": "kv", "heads_first": 1.0, "heads_last": 0.5},
            r"^match: kv cannot be matched: this shape has at least",
        ),
        ({"group": 0}, r"^group: expected above 0, got 0$"),
        ({"mlp_last": -1.0}, r"^mlp_last: expected above 0, got -1.0$"),
        ({"heads": 12}, r"^heads: family openelm has no such setting"),
    ],
)
def test_impossible_openelms_are_refused_in_one_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(EntasisError, match=line) as caught:
        family("openelm", **({"layers": 16, "width": 1280} | changes))
    assert "\n" not in str(caught.value)


def test_a_taper_that_rounding_made_straight_is_said() -> None:
    flat = design("tapered", {"layers": 4, "width": 64, "heads": 4, "mlp_multiple": 256})
    assert [finding.message for finding in flat.findings if "equals the uniform shape" in finding.message]
    bent = design("tapered", {"layers": 4, "width": 64, "heads": 4})
    assert not [finding.message for finding in bent.findings if "equals the uniform shape" in finding.message]
