"""Shapes of changing width against a second solver: effective weights counted in blocks, roots by closed form."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from entasis.errors import EntasisError, ShapeError
from entasis.shape.budget import budget
from entasis.shape.families import design, family
from entasis.shape.model_config import ModelConfig, Style
from entasis.shape.records import Shape
from entasis.shape.registry import Design

LLAMA = ModelConfig(100_263, 4096, "llama")


@dataclass(frozen=True)
class Request:
    """A shape whose widths turn once, with ends that are matched; heads as wide as each layer."""

    family: str
    layers: int
    width: int
    turn: int
    ratio: float
    multiple: int
    progression: str
    style: Style
    mlp_ratio: float

    @property
    def settings(self) -> dict[str, Any]:
        ratio = {"bowtie": "bottleneck", "diamond": "peak", "growing": "last", "narrowing": "last"}[self.family]
        turn = {"turn": self.turn} if self.family in ("bowtie", "diamond") else {}
        return {
            "layers": self.layers,
            "width": self.width,
            "heads": 1,
            "multiple": self.multiple,
            "progression": self.progression,
            "mlp_ratio": self.mlp_ratio,
            ratio: self.ratio,
            **turn,
        }

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(100_263, 4096, self.style)

    def made(self) -> Design:
        return design(self.family, self.settings, self.config)


# --- the second solver ------------------------------------------------------------------------------------------------


def shares_of(request: Request, step: float) -> list[float]:
    """Widths as shares of the first one: `step` is the factor, or the difference, from one layer to the next."""
    ahead, behind = request.turn - 1, request.layers - request.turn
    shares = [1.0]
    for layer in range(2, request.layers + 1):
        if request.progression == "geometric":
            shares.append(shares[-1] * (step if layer <= request.turn else step ** (-ahead / behind)))
        else:
            shares.append(shares[-1] + (step if layer <= request.turn else -step * ahead / behind))
    return shares


def first_width(request: Request, shares: Sequence[float]) -> float:
    """The positive root of `K sum(c^2) w^2 - wastes = K L h^2`, whose two wastes each count only where an end is wider
    than h: all four assumptions are tried, and the root that fulfils its own is taken."""
    h, c_last = request.width, shares[-1]
    down = request.mlp_ratio
    weight = 4 + (3 if request.style == "llama" else 2) * request.mlp_ratio
    roots = []
    for first_wide, last_wide in itertools.product([False, True], repeat=2):
        a = weight * sum(share**2 for share in shares) - 3 * first_wide - down * c_last**2 * last_wide
        b = (3 * first_wide + down * c_last * last_wide) * h
        c = -weight * request.layers * h * h
        root = (-b + math.sqrt(b * b - 4 * a * c)) / (2 * a)
        if (root > h) == first_wide and (root * c_last > h) == last_wide:
            roots.append(root)
    assert len({round(root, 6) for root in roots}) == 1, "the count grows with the width, so that there is one root"
    return roots[0]


def solved_chain(request: Request) -> list[float]:
    """Widths before the last rounding: the step is halved in until the turning layer has its width."""

    def at_turn(step: float) -> float:
        shares = shares_of(request, step)
        return first_width(request, shares) * shares[request.turn - 1]

    wide = request.ratio > 1
    if request.progression == "geometric":
        low, high = (1.0, 2.0) if wide else (0.0, 1.0)
    else:
        low, high = (0.0, 1.0) if wide else (-1 / (request.turn - 1), 0.0)
    while wide and at_turn(high) < request.ratio * request.width:
        low, high = high, high + (high - low) * 2
    for _ in range(200):
        step = (low + high) / 2
        if at_turn(step) < request.ratio * request.width:
            low = step
        else:
            high = step
    shares = shares_of(request, step)
    first = first_width(request, shares)
    return [round(first) * share for share in shares]


def random_requests(count: int) -> list[Request]:
    source = random.Random(2_606_18246)
    requests = []
    for number in range(count):
        name = ("diamond", "growing", "narrowing", "bowtie")[number % 4]
        layers = source.randint(3, 40)
        requests.append(
            Request(
                family=name,
                layers=layers,
                width=source.randrange(256, 4097, 32),
                turn=layers if name in ("growing", "narrowing") else source.randint(2, layers - 1),
                ratio=source.uniform(1.02, 1.45) if name in ("diamond", "growing") else source.uniform(0.3, 0.97),
                multiple=source.choice([1, 8, 16, 32]),
                progression="arithmetic" if name == "bowtie" else source.choice(["geometric", "arithmetic"]),
                style=source.choice(["gpt2", "llama"]),
                mlp_ratio=source.choice([4.0, 4.0, 8 / 3, 1.0]),
            )
        )
    return requests


RANDOM_REQUESTS = random_requests(240)


@pytest.mark.parametrize("request_", RANDOM_REQUESTS, ids=lambda each: f"{each.family}-{each.layers}x{each.width}")
def test_any_setting_agrees_with_the_second_solver(request_: Request) -> None:
    chain = solved_chain(request_)
    widths = [layer.width for layer in request_.made().shape.layers]
    assert len(widths) == len(chain)
    multiple = request_.multiple
    for number, (width, value) in enumerate(zip(widths, chain, strict=True), start=1):
        # Both solve in real numbers; where a value lies that near to a half, the last digits decide.
        if abs(value / multiple % 1 - 0.5) < 1e-5:
            assert abs(width - value) <= multiple / 2 + 1e-2, number
        else:
            assert width == round(value / multiple) * multiple, number


@pytest.mark.parametrize("request_", RANDOM_REQUESTS, ids=lambda each: f"{each.family}-{each.layers}x{each.width}")
def test_the_match_is_off_by_no_more_than_rounding_can_move_it(request_: Request) -> None:
    """Each width is moved by at most half a multiple, and by its share of the half that the first width is rounded by;
    what a layer weighs changes by at most the steepest slope between, times that."""
    made = request_.made()
    config = request_.config
    off = budget(made.shape, config).effective_parameters - budget(made.reference, config).effective_parameters
    weight = 4 + (3 if request_.style == "llama" else 2) * request_.mlp_ratio
    bound = 0.0
    for layer in made.shape.layers:
        moved = request_.multiple / 2 + 0.5 * max(1.0, request_.ratio)
        bound += weight * (2 * layer.width * moved + moved**2) + 3 * layer.width  # hidden units are whole numbers too
    assert abs(off) <= bound


# --- what these shapes look like --------------------------------------------------------------------------------------


def widths_of(name: str, **settings: Any) -> list[int]:
    return [layer.width for layer in design(name, settings).shape.layers]


def test_diamonds_are_wide_inside() -> None:
    for progression in ("geometric", "arithmetic"):
        widths = widths_of("diamond", layers=12, width=768, heads=12, turn=5, peak=1.4, progression=progression)
        assert widths[4] == max(widths) == round(1.4 * 768 / 32) * 32
        assert widths[0] == widths[-1] == min(widths) < 768
        assert widths == sorted(widths[:5]) + sorted(widths[5:], reverse=True)


def test_growing_and_narrowing_go_one_way() -> None:
    growing = widths_of("growing", layers=12, width=768, heads=12)
    assert growing == sorted(growing)
    assert (growing[0] < 768, growing[-1]) == (True, 1152)
    narrowing = widths_of("narrowing", layers=12, width=768, heads=12)
    assert narrowing == sorted(narrowing, reverse=True)
    assert (narrowing[0] > 768, narrowing[-1]) == (True, 224)


def test_arithmetic_steps_are_equal_and_geometric_factors_are() -> None:
    even = widths_of("narrowing", layers=9, width=900, heads=1, multiple=1, progression="arithmetic")
    steps = [before - after for before, after in itertools.pairwise(even)]
    assert max(steps) - min(steps) <= 1
    curved = widths_of("narrowing", layers=9, width=9000, heads=1, multiple=1)
    factors = [after / before for before, after in itertools.pairwise(curved)]
    assert max(factors) - min(factors) < 1e-3


@pytest.mark.parametrize("name", ["bowtie", "diamond", "growing", "narrowing"])
@pytest.mark.parametrize("match", ["effective", "kv"])
def test_permuted_middles_follow_a_seeded_shuffle_and_ends_stay(name: str, match: str) -> None:
    settings = {"layers": 12, "width": 640, "heads": 16, "match": match}
    plain = widths_of(name, **settings)
    seen = set()
    for seed in (0, 1, 7):
        middle = plain[1:-1]
        random.Random(seed).shuffle(middle)
        permuted = widths_of(name, **settings, permute=seed)
        assert permuted == [plain[0], *middle, plain[-1]]
        seen.add(tuple(permuted))
    assert len(seen) == 3


@pytest.mark.parametrize("name", ["bowtie", "diamond", "growing", "narrowing", "half-first"])
def test_a_ratio_of_one_is_the_straight_column(name: str) -> None:
    ratio = {"bowtie": "bottleneck", "diamond": "peak", "half-first": "first"}.get(name, "last")
    made = design(name, {"layers": 5, "width": 90, "heads": 3, ratio: 1})
    assert made.shape == made.reference == family("uniform", layers=5, width=90, heads=3)


def test_the_first_block_can_be_half_as_wide() -> None:
    made = design("half-first", {"layers": 12, "width": 768, "heads": 12})
    shape = made.shape
    assert (shape.embed_width, shape.layers[0].width, shape.head_width) == (384, 384, 768)
    assert len({layer.width for layer in shape.layers[1:]}) == 1
    assert all(layer.heads == 12 and layer.mlp_hidden == 4 * layer.width for layer in shape.layers)
    with pytest.raises(ShapeError, match=r"tied embeddings share one table"):
        family("half-first", layers=12, width=768, heads=12, config=ModelConfig(97, 16, "gpt2"))
    loosely = design("half-first", {"layers": 12, "width": 768, "heads": 12}, ModelConfig(97, 16, "gpt2", tied=False))
    assert not [finding for finding in loosely.findings if finding.level == "error"]


# --- both papers at once ----------------------------------------------------------------------------------------------


def test_prism_bowties_have_hardware_friendly_heads_that_narrow_with_depth() -> None:
    made = design("prism-bowtie", {"layers": 24, "width": 1024, "heads": 16})
    layers = made.shape.layers
    assert [layer.head_dim for layer in layers] == [256] * 3 + [128] * 3 + [64] * 18
    assert all(layer.kv_heads == layer.heads == max(1, round(layer.width / layer.head_dim)) for layer in layers)
    widths = [layer.width for layer in layers]
    assert widths[17] == min(widths) == 320
    assert widths[0] == widths[-1] == max(widths) > 1024
    assert all(width % 64 == 0 for width in widths)
    assert {(layer.heads, layer.head_dim, layer.width) for layer in made.reference.layers} == {(16, 64, 1024)}
    assert not [finding for finding in made.findings if finding.level == "error"]
    assert budget(made.shape, LLAMA).effective_parameters / budget(
        made.reference, LLAMA
    ).effective_parameters == pytest.approx(1, abs=0.02)


def test_without_early_heads_a_prism_bowtie_is_a_bowtie_of_one_head_dim() -> None:
    both = family("prism-bowtie", layers=12, width=768, heads=12, early_head_dim=64)
    assert {layer.head_dim for layer in both.layers} == {64}
    assert [layer.heads for layer in both.layers] == [layer.width // 64 for layer in both.layers]


# --- what is refused --------------------------------------------------------------------------------------------------

BASE: dict[str, Any] = {"layers": 12, "width": 768, "heads": 12}


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        ("diamond", {"peak": 0.9}, r"^peak: expected at least 1, got 0.9$"),
        ("diamond", {"peak": float("nan")}, r"^peak: expected at least 1, got nan$"),
        ("diamond", {"peak": float("inf")}, r"^peak: expected at most"),
        ("diamond", {"peak": 30.0}, r"^match: effective parameters cannot be matched: the wide part alone outweighs"),
        (
            "diamond",
            {"peak": 30.0, "match": "kv"},
            r"^match: kv cannot be matched: this shape has at least [\d,]+, uni",
        ),
        ("diamond", {"peak": 3.4}, r"^match: effective parameters cannot be matched"),
        ("diamond", {"peak": 2.9}, r"^layer 1: width \d+\.\d rounds to 0 at multiple 32; choose a milder shape"),
        ("diamond", {"peak": 1e12, "match": "flops"}, r"^peak: expected at most 2147483647"),
        ("diamond", {"turn": 1}, r"^turn: expected a layer from 2 to 11 of 12, got 1$"),
        ("diamond", {"layers": 2}, r"^layers: expected from 3 to 10000 where the width turns inside, got 2$"),
        ("growing", {"layers": 1}, r"^layers: expected from 2 to 10000 in a growing shape, got 1$"),
        ("growing", {"layers": 2}, r"^match: effective parameters cannot be matched"),
        ("growing", {"last": 0.5}, r"^last: expected at least 1 in a growing shape, got 0.5$"),
        ("growing", {"last": float("inf")}, r"^last: expected at most"),
        ("growing", {"turn": 3}, r"^turn: family growing has no such setting"),
        ("narrowing", {"last": 1.5}, r"^last: expected above 0 and at most 1, got 1.5$"),
        ("narrowing", {"last": 0.0}, r"^last: "),
        ("narrowing", {"last": 0.01}, r"^layer 12: width 7.7 rounds to 0 at multiple 32"),
        ("narrowing", {"last": 0.01, "match": "flops"}, r"^layer 12: width 7.7 rounds to 0 at multiple 32"),
        (
            "narrowing",
            {"progression": "harmonic"},
            r"^progression: expected 'geometric' or 'arithmetic'; got 'harmonic'$",
        ),
        ("bowtie", {"permute": -1}, r"^permute: expected at least 0, got -1$"),
        ("bowtie", {"permute": True}, r"^permute: expected a whole number"),
        ("bowtie", {"head_dim": 64, "kv_heads": 5}, r"^kv_heads: 5 do not divide 12 heads into groups$"),
        ("bowtie", {"head_dim": 64, "kv_heads": 24}, r"^kv_heads: 24 do not divide 12 heads into groups$"),
        ("half-first", {"first": 1.5}, r"^first: expected above 0 and at most 1, got 1.5$"),
        ("half-first", {"layers": 1}, r"^layers: expected from 2 to 10000 where the first is narrower, got 1$"),
        ("half-first", {"multiple": 20}, r"^layer 1: 12 heads do not divide width 380"),
        ("prism-bowtie", {"heads": 7}, r"^7 heads do not divide the reference width 768, so there is no baseline head"),
        ("prism-bowtie", {"hold": 0}, r"^hold: expected above 0, got 0$"),
        ("prism-bowtie", {"layers": 2}, r"^layers: expected from 3"),
        ("prism-bowtie", {"early_head_dim": -64}, r"^early_head_dim: expected above 0"),
    ],
)
def test_nonsense_is_refused_in_one_line(name: str, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(EntasisError, match=line) as caught:
        family(name, **(BASE | changes))
    assert "\n" not in str(caught.value)


def test_absurd_holds_take_no_memory() -> None:
    shape = family("prism-bowtie", layers=12, width=768, heads=12, hold=2**31 - 1)
    assert {layer.head_dim for layer in shape.layers} == {256}


def test_the_wastes_of_a_wide_end_are_not_the_same_at_both_ends() -> None:
    """Turned round, a growing shape weighs something else: layer 1 leaves out inputs, the last layer outputs."""
    made = design("growing", {"layers": 8, "width": 1280, "heads": 16, "multiple": 1}, LLAMA)
    mine = budget(made.shape, LLAMA).effective_parameters
    theirs = budget(made.reference, LLAMA).effective_parameters
    turned = budget(Shape(made.shape.layers[::-1], 1280), LLAMA).effective_parameters
    first = made.shape.layers[-1]
    assert abs(mine - theirs) < 2e-3 * theirs
    assert turned - mine == (first.width - 1280) * (first.mlp_hidden - first.qkv_width)
