"""Every family, by every budget, in both styles: the match lands on the nearest shape that there is."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest

from entasis.errors import EntasisError, ShapeError
from entasis.shape import chains, tapers, waists
from entasis.shape.budget import budget
from entasis.shape.families import design, families, family_settings
from entasis.shape.match import MATCH_FIELDS, Match, matched
from entasis.shape.model_config import ModelConfig, Style
from entasis.shape.records import LayerShape, Shape

STYLES = get_args(Style)
MATCHES = get_args(Match)
WAISTS = ("bowtie", "diamond", "growing", "narrowing", "half-first", "prism-bowtie")
TAPERS = ("tapered", "openelm", "crown", "frame", "reverse")
EQUAL_BY_NATURE = ("prism", "prism-reversed", "prism-abrupt", "all-wide", "uniform")
UNMATCHED = ("explicit",)


def config_of(style: Style) -> ModelConfig:
    # Untied, since a narrow embedding needs it.
    return ModelConfig(1021, 256, style, tied=False)


def cost(shape: Shape, by: str, config: ModelConfig) -> int:
    return int(getattr(budget(shape, config), MATCH_FIELDS[by]))


@dataclass
class Spy:
    """Notes what `matched` was asked, and every scale at which it built a shape."""

    build: Callable[[float], Shape] | None = None
    scales: list[float] = field(default_factory=list)

    def __call__(self, build: Callable[[float], Shape], reference: Shape, by: Match, config: ModelConfig) -> Shape:
        self.build = build

        def noted(scale: float) -> Shape:
            self.scales.append(scale)
            return build(scale)

        return matched(noted, reference, by, config)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    watching = Spy()
    for module in (chains, tapers, waists):
        monkeypatch.setattr(module, "matched", watching)
    return watching


def neighbours(build: Callable[[float], Shape], scale: float) -> tuple[Shape | None, Shape | None]:
    """The next other shapes below and above a scale, found by halving the distance to one that differs."""
    here = build(scale)
    found: list[Shape | None] = []
    for farthest in (scale * 1e-3, scale * 4):
        near, far = scale, farthest
        if build(far) == here:
            found.append(None)
            continue
        for _ in range(80):
            middle = (near + far) / 2
            if middle in (near, far):
                break
            if build(middle) == here:
                near = middle
            else:
                far = middle
        found.append(build(far))
    return found[0], found[1]


def settings_of(name: str, source: random.Random) -> dict[str, Any]:
    """Random settings at which the shape can be matched by any budget."""
    heads = source.choice([4, 8, 12, 16])
    layers = source.randint(4, 14)
    settings: dict[str, Any] = {"layers": layers, "width": heads * source.choice([32, 40, 48, 64, 96]), "heads": heads}
    known = family_settings(name)
    extra: dict[str, Any] = {
        "multiple": source.choice([1, 8, 2 * heads]),
        "mlp_multiple": source.choice([1, 8, 16]),
        "head_dim_multiple": source.choice([None, 4, 8]),
        "mlp_ratio": source.choice([4.0, 8 / 3, 2.0]),
        "progression": source.choice(["geometric", "arithmetic"]),
        "permute": source.choice([None, None, 3]),
        "kv_heads": source.choice([None, 2, 4]),
    }
    settings |= {key: value for key, value in extra.items() if key in known and source.random() < 0.7}
    if name in ("bowtie", "prism-bowtie"):
        settings |= {"bottleneck": source.uniform(0.3, 0.9), "turn": source.randint(2, layers - 1)}
    if name == "prism-bowtie":
        settings |= {"early_head_dim": settings["width"] // heads * 2, "hold": 2}
    if name == "diamond":
        settings |= {"peak": source.uniform(1.05, 1.4), "turn": source.randint(2, layers - 1)}
    if name == "growing":
        settings |= {"last": source.uniform(1.05, 1.3)}
    if name == "narrowing":
        settings |= {"last": source.uniform(0.4, 0.95)}
    if name == "half-first":
        settings |= {"first": source.choice([0.5, 0.75])}
    if name == "openelm":
        settings = {"layers": layers, "width": settings["width"], "head_dim": 16, "mlp_multiple": 16}
    return settings


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("by", MATCHES)
@pytest.mark.parametrize("name", [*WAISTS, *TAPERS])
@pytest.mark.parametrize("seed", range(4))
def test_no_neighbour_in_the_scale_is_nearer(spy: Spy, name: str, by: Match, style: Style, seed: int) -> None:
    config = config_of(style)
    settings = settings_of(name, random.Random(f"{name} {by} {style} {seed}")) | {"match": by}
    if name == "openelm" and by == "kv":
        with pytest.raises(ShapeError, match=r"^match: kv does not grow with what this family scales"):
            design(name, settings, config)
        return
    made = design(name, settings, config)
    target, mine = cost(made.reference, by, config), cost(made.shape, by, config)
    if spy.build is None:
        assert by == "effective", "only the published rule goes without exact counts"
        return
    scale = next(each for each in reversed(spy.scales) if spy.build(each) == made.shape)
    below, above = neighbours(spy.build, scale)
    for neighbour in (below, above):
        if neighbour is not None:
            assert abs(mine - target) <= abs(cost(neighbour, by, config) - target)
    # Between the neighbours there is nothing else, so that what is left is half a step at most.
    if mine < target:
        assert above is not None
        assert target - mine <= (cost(above, by, config) - mine) / 2
    if mine > target:
        assert below is not None
        assert mine - target <= (mine - cost(below, by, config)) / 2


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("by", MATCHES)
@pytest.mark.parametrize("name", [*WAISTS, *TAPERS])
def test_fine_steps_match_closely(name: str, by: Match, style: Style) -> None:
    """A tenth of a percent, where nothing is rounded but to whole numbers."""
    config = config_of(style)
    settings: dict[str, Any] = {"layers": 9, "width": 960, "heads": 4, "match": by}
    known = family_settings(name)
    if name == "openelm":
        if by == "kv":
            return
        settings |= {"head_dim": 16}
    settings |= {each: 1 for each in ("multiple", "mlp_multiple") if each in known}
    settings = {key: value for key, value in settings.items() if key in known}
    made = design(name, settings, config)
    # prism-bowtie's heads come whole, and the first have 256 coordinates, over a quarter of the width.
    near = 0.06 if name == "prism-bowtie" else 0.004
    assert cost(made.shape, by, config) / cost(made.reference, by, config) == pytest.approx(1, abs=near)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("by", MATCHES)
@pytest.mark.parametrize("name", EQUAL_BY_NATURE)
def test_head_schedules_are_equal_without_being_matched(name: str, by: Match, style: Style) -> None:
    config = config_of(style)
    settings: dict[str, Any] = {"layers": 12, "width": 768, "heads": 12}
    settings |= {"early_head_dim": 256} if name in ("prism", "prism-reversed") else {}
    settings |= {"early_heads": 3, "early_layers": 5} if name == "prism-abrupt" else {}
    settings |= {"wide_heads": 3} if name == "all-wide" else {}
    made = design(name, settings, config)
    assert cost(made.shape, by, config) == cost(made.reference, by, config)


def test_no_family_is_left_out() -> None:
    """A new family needs its place above: matched, equal by nature, or neither."""
    assert set(families()) == {*WAISTS, *TAPERS, *EQUAL_BY_NATURE, *UNMATCHED}
    for name in families():
        assert ("match" in family_settings(name)) == (name in (*WAISTS, *TAPERS))


@pytest.mark.parametrize("name", ["bowtie", "diamond", "narrowing"])
@pytest.mark.parametrize("by", MATCHES)
@pytest.mark.parametrize("seed", range(6))
def test_whole_heads_in_groups_are_matched_as_far_as_they_divide(name: str, by: Match, seed: int) -> None:
    """With heads of one size, the number of groups goes up and down with the number of heads: 12 heads have 4 groups of
    3, 13 have one. The scales around are tried, too, so that what is left stays within half a group of each layer."""
    source = random.Random(seed)
    dim, heads = source.choice([16, 32]), 16
    settings = {"layers": source.randint(5, 16), "width": dim * heads, "heads": heads, "head_dim": dim, "multiple": dim,
                "kv_heads": source.choice([16, 8, 4]), "match": by}  # fmt: skip
    config = config_of("llama")
    made = design(name, settings, config)
    ratio = cost(made.shape, by, config) / cost(made.reference, by, config)
    assert ratio == pytest.approx(1, abs=0.08 if by == "kv" else 0.06)
    assert not [finding for finding in made.findings if finding.level == "error"]


def wild_settings(name: str, source: random.Random) -> dict[str, Any]:
    """Whole numbers and fractions of every size, most of which make no sense together."""
    whole = [0, 1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 32, 48, 100, 256, 640, 1000, 2**31 - 1, 10**20, -1]
    real = [0.0, 1e-9, 0.01, 0.3, 0.5, 1.0, 1.5, 4.0, 30.0, 1e9, float("inf"), float("nan"), -0.5]
    settings: dict[str, Any] = {}
    for key, parameter in inspect.signature(families()[name]).parameters.items():
        kind = str(parameter.annotation)
        if key == "config" or (parameter.default is not inspect.Parameter.empty and source.random() < 0.75):
            continue
        if key in ("layers", "width", "heads") and source.random() < 0.8:
            settings[key] = {"layers": source.randint(1, 12), "width": source.choice([48, 64, 640]), "heads": 4}[key]
        elif "Match" in kind:
            settings[key] = source.choice(MATCHES)
        elif "Progression" in kind:
            settings[key] = source.choice(["geometric", "arithmetic"])
        else:
            sizes = [size for size in whole if key != "layers" or not 48 < size <= 1000]  # deep ones only take time
            settings[key] = source.choice(real if "float" in kind else sizes)
    return settings


@pytest.mark.parametrize("name", [*WAISTS, *TAPERS, *EQUAL_BY_NATURE])
def test_any_request_is_answered_by_a_shape_or_by_one_line(name: str) -> None:
    source = random.Random(name)
    answers = {"shape": 0, "line": 0}
    for _ in range(150):
        settings = wild_settings(name, source)
        try:
            made = design(name, settings, config_of(source.choice(STYLES)))
        except EntasisError as error:
            assert str(error).strip(), settings
            assert "\n" not in str(error), settings
            assert len(str(error)) < 500, settings
            answers["line"] += 1
        else:
            assert len(made.shape.layers) == len(made.reference.layers)
            answers["shape"] += 1
    assert min(answers.values()) > 3, answers


# --- the solver itself ------------------------------------------------------------------------------------------------

CONFIG = config_of("llama")


def column(hidden: int) -> Shape:
    return Shape((LayerShape(32, 2, 2, 16, hidden),) * 3, 32)


def test_the_nearest_step_wins_on_either_side() -> None:
    def build(scale: float) -> Shape:
        return column(max(1, round(scale * 1.6)) * 10)

    for hidden in range(10, 300, 7):
        found = matched(build, column(hidden), "effective", CONFIG).layers[0].mlp_hidden
        assert abs(found - hidden) <= 5
        assert found % 10 == 0


def test_a_shape_that_costs_the_same_is_left_as_it_is() -> None:
    asked = []

    def build(scale: float) -> Shape:
        asked.append(scale)
        return column(64)

    assert matched(build, column(64), "flops", CONFIG) == column(64)
    assert set(asked) == {1.0}


def test_what_cannot_be_reached_is_an_error_with_numbers() -> None:
    target = budget(column(64), CONFIG).parameters
    with pytest.raises(ShapeError, match=r"^match: parameters does not grow with what this family scales: ") as caught:
        matched(lambda _: column(8), column(64), "parameters", CONFIG)
    assert f"{target:,}" in str(caught.value)
    with pytest.raises(ShapeError, match=r"^match: parameters cannot be matched: this shape has at least ") as caught:
        matched(lambda scale: column(70 + round(scale)), column(64), "parameters", CONFIG)
    assert f"{budget(column(70), CONFIG).parameters:,}, uniform {target:,}" in str(caught.value)
