"""The bowtie's widths against a second solver: closed form and bisection, straight from the published rule."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass
from typing import Any, get_args

import pytest

from entasis.errors import EntasisError, ShapeError
from entasis.shape.budget import budget
from entasis.shape.families import bowtie, design
from entasis.shape.model_config import ModelConfig, Style

WIDTHS_200M = [1152, 960, 832, 704, 608, 512, 448, 352, 320, 256, 224, 192, 288, 480, 736, 1152]
ENDS_1B = [2400, 2208, 2048, 1888], [448, 416, 384, 480], [1920, 2400]


@dataclass(frozen=True)
class Request:
    """A bowtie, with what its layers weigh: (heads + 1) * w^2 and MLPs of ratio * w or a fixed number of units."""

    layers: int
    width: int
    turn: int
    bottleneck: float
    multiple: int
    style: Style = "llama"
    heads: int = 16
    kv_heads: int = 16
    mlp_ratio: float = 4.0
    mlp_hidden: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return {name: value for name, value in given.items() if name != "style"}

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(100_263, 4096, self.style)

    @property
    def mlp_matrices(self) -> int:
        return 3 if self.style == "llama" else 2

    @property
    def zero_share(self) -> float:
        """Query, key and value outputs of layer 1 per coordinate of width."""
        return 1 + 2 * self.kv_heads / self.heads

    @property
    def square(self) -> float:
        ratio = self.mlp_ratio if self.mlp_hidden is None else 0.0
        return self.zero_share + 1 + self.mlp_matrices * ratio

    @property
    def line(self) -> float:
        return self.mlp_matrices * (self.mlp_hidden or 0)


def continuous_first_width(request: Request, factor: float) -> tuple[float, list[float]]:
    """The positive root for a factor, and the shares of the first width. Both ends are wider than the reference."""
    back = factor ** (-(request.turn - 1) / (request.layers - request.turn))
    shares = [1.0]
    for layer in range(2, request.layers + 1):
        shares.append(shares[-1] * (factor if layer <= request.turn else back))
    h = request.width
    down_ratio = request.mlp_ratio if request.mlp_hidden is None else 0.0
    down_fixed = request.mlp_hidden or 0
    # K sum c^2 w1^2 + B sum c w1 - zero_share (w1 - h) w1 - (ratio w1 + fixed) (w1 - h) = L (K h^2 + B h)
    a = request.square * sum(share**2 for share in shares) - request.zero_share - down_ratio
    b = request.line * sum(shares) + (request.zero_share + down_ratio) * h - down_fixed
    c = down_fixed * h - request.layers * (request.square * h + request.line) * h
    return (-b + math.sqrt(b * b - 4 * a * c)) / (2 * a), shares


def independent_chain(request: Request) -> list[float]:
    """Widths before the last rounding."""
    low, high = 0.0, 1.0
    target = request.bottleneck * request.width
    for _ in range(80):
        factor = (low + high) / 2
        narrowest = continuous_first_width(request, factor)[0] * factor ** (request.turn - 1)
        if abs(narrowest / target - 1) <= 1e-6:
            break
        low, high = (factor, high) if narrowest < target else (low, factor)
    first, shares = continuous_first_width(request, factor)
    return [round(first) * share for share in shares]


def random_requests(count: int) -> list[Request]:
    source = random.Random(20260616)
    requests = []
    for _ in range(count):
        layers = source.randint(3, 48)
        heads = source.choice([4, 8, 12, 16])
        requests.append(
            Request(
                layers=layers,
                width=source.randrange(128, 4097, 32),
                turn=source.randint(2, layers - 1),
                bottleneck=source.uniform(0.15, 0.97),
                multiple=source.choice([1, 8, 16, 32, 32, 64]),
                style=source.choice(["gpt2", "llama"]),
                heads=heads,
                kv_heads=source.choice([n for n in range(1, heads + 1) if heads % n == 0]),
                mlp_ratio=source.choice([4.0, 4.0, 8 / 3, 3.5, 1.0, 0.25]),
                mlp_hidden=source.choice([None, None, None, 0, 256, 4096]),
            )
        )
    return requests


RANDOM_REQUESTS = random_requests(300)


def widths_of(request: Request) -> list[int]:
    return [layer.width for layer in design("bowtie", request.settings, request.config).shape.layers]


def test_the_published_widths_at_200m() -> None:
    shape = bowtie(layers=16, width=640, heads=16, bottleneck=0.3, turn=12, multiple=32)
    assert [layer.width for layer in shape.layers] == WIDTHS_200M
    assert all((layer.heads, layer.kv_heads) == (16, 16) for layer in shape.layers)
    assert all(layer.head_dim == layer.width // 16 and layer.mlp_hidden == 4 * layer.width for layer in shape.layers)
    assert (shape.embed_width, shape.head_width) == (640, 640)


def test_the_published_widths_at_1b() -> None:
    widths = [layer.width for layer in bowtie(layers=32, width=1280, heads=16, turn=24).layers]
    assert len(widths) == 32
    assert (widths[:4], widths[21:25], widths[-2:]) == ENDS_1B


@pytest.mark.parametrize(
    ("layers", "width", "turn", "waist"),
    [(16, 640, 12, 192), (24, 960, 18, 288), (32, 1280, 24, 384), (40, 1600, 30, 480)],
)
def test_every_published_dense_scale(layers: int, width: int, turn: int, waist: int) -> None:
    request = Request(layers, width, turn, 0.3, 32)
    widths = widths_of(request)
    assert widths == [round(value / 32) * 32 for value in independent_chain(request)]
    assert widths[turn - 1] == min(widths) == waist
    assert widths[0] == widths[-1] == max(widths)
    assert sum(widths) / layers < width
    defaults = bowtie(layers=layers, width=width, heads=16)
    assert [layer.width for layer in defaults.layers] == widths  # turn, bottleneck, multiple are the published ones


@pytest.mark.parametrize("request_", RANDOM_REQUESTS, ids=lambda each: f"{each.layers}x{each.width}-{each.style}")
def test_any_setting_agrees_with_the_independent_solver(request_: Request) -> None:
    chain = independent_chain(request_)
    multiple = request_.multiple
    if min(round(value / multiple) for value in chain) == 0:
        with pytest.raises(ShapeError, match=r"^layer \d+: width .* rounds to 0 at multiple"):
            widths_of(request_)
        return
    widths = widths_of(request_)
    assert len(widths) == len(chain)
    for number, (width, value) in enumerate(zip(widths, chain, strict=True), start=1):
        if abs(value / multiple % 1 - 0.5) < 1e-9:  # an exact half: the last bit of either solver decides
            assert abs(width - value) <= multiple / 2 + 1e-6, number
        else:
            assert width == round(value / multiple) * multiple, number
    assert widths[0] == widths[-1]
    assert widths == sorted(widths[: request_.turn], reverse=True) + sorted(widths[request_.turn :])


@pytest.mark.parametrize("request_", RANDOM_REQUESTS, ids=lambda each: f"{each.layers}x{each.width}-{each.style}")
def test_the_match_is_off_by_no_more_than_rounding_explains(request_: Request) -> None:
    try:
        made = design("bowtie", request_.settings, request_.config)
    except ShapeError:
        return
    mine = budget(made.shape, request_.config).effective_parameters
    theirs = budget(made.reference, request_.config).effective_parameters
    if any(layer.heads * layer.head_dim != layer.width for layer in (*made.shape.layers, *made.reference.layers)):
        return  # heads that do not divide a width are cut, of which the solver knows nothing
    blocks = request_.layers * (request_.square * request_.width + request_.line) * request_.width
    # The factor is what rounding a few layers to coarse widths needs; a match without the wastes is off by more.
    assert abs(mine - theirs) / blocks <= 0.6 * request_.multiple / request_.width + 1e-3


@pytest.mark.parametrize("multiple", [32, 1])
def test_the_published_mixture_of_experts(multiple: int) -> None:
    """22 experts of 512 units at the reference width: weights per squared width 4 + 3 * 22 * 512 / 1600, a router, and
    the last waste counted once per expert. Expert sizes follow the widths and are rounded to whole units only."""
    ratio, experts = 512 / 1600, 22

    @dataclass(frozen=True)
    class Mixture(Request):
        @property
        def line(self) -> float:
            return float(experts)

    request = Mixture(40, 1600, 30, 0.3, multiple, mlp_ratio=experts * ratio)
    chain = independent_chain(request)
    settings = {
        "layers": 40,
        "width": 1600,
        "heads": 16,
        "multiple": multiple,
        "experts": experts,
        "experts_per_token": 3,
        "expert_hidden": 512,
    }
    made = design("bowtie", settings, request.config)
    layers = made.shape.layers
    assert [layer.width for layer in layers] == [round(value / multiple) * multiple for value in chain]
    assert [layer.mlp_hidden for layer in layers] == [round(512 * layer.width / 1600) for layer in layers]
    assert {(layer.experts, layer.experts_per_token) for layer in (*layers, *made.reference.layers)} == {(22, 3)}
    mine, theirs = budget(made.shape, request.config), budget(made.reference, request.config)
    assert mine.effective_parameters / theirs.effective_parameters == pytest.approx(1, abs=0.01)


def test_unrounded_widths_match_closely() -> None:
    checked = 0
    for layers, width, ratio in [(16, 640, 0.3), (9, 512, 0.5), (40, 1600, 0.25), (12, 768, 0.8)]:
        for style in get_args(Style):
            config = ModelConfig(50_257, 1024, style)
            wanted = {"layers": layers, "width": width, "heads": 1, "bottleneck": ratio, "multiple": 1}
            made = design("bowtie", wanted, config)
            mine = budget(made.shape, config).effective_parameters
            assert mine / budget(made.reference, config).effective_parameters == pytest.approx(1, abs=1e-3)
            assert min(layer.width for layer in made.shape.layers) == pytest.approx(ratio * width, abs=1)
            checked += 1
    assert checked == 8


def test_ends_round_alike_where_the_first_width_is_an_exact_half() -> None:
    """The first width of this bowtie lies halfway between two multiples, where a running product may go either way."""
    halves = 0
    for width in range(320, 1280, 32):
        request = Request(16, width, 12, 0.3, 32)
        chain = independent_chain(request)
        halves += chain[0] % 32 == 16
        widths = widths_of(request)
        assert widths[0] == widths[-1] == round(chain[0] / 32) * 32
    assert halves > 0, "no case left to test"


def test_a_ratio_of_one_is_the_straight_column() -> None:
    made = design("bowtie", {"layers": 6, "width": 90, "heads": 3, "bottleneck": 1.0})
    assert made.shape == made.reference
    assert {layer.width for layer in made.shape.layers} == {90}
    assert design("bowtie", {"layers": 6, "width": 90, "heads": 3, "bottleneck": 1}).shape == made.shape


def test_very_deep_bowties_are_quick_and_do_not_overflow() -> None:
    made = design("bowtie", {"layers": 3000, "width": 640, "heads": 16, "turn": 2999, "multiple": 1})
    assert made.shape.layers[2998].width == 192
    assert made.shape.layers[0].width == made.shape.layers[-1].width


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"bottleneck": 1.01}, r"^bottleneck: expected above 0 and at most 1, got 1.01$"),
        ({"bottleneck": 0.0}, r"^bottleneck: "),
        ({"bottleneck": -0.3}, r"^bottleneck: "),
        ({"bottleneck": float("nan")}, r"^bottleneck: "),
        (
            {"bottleneck": 0.001},
            r"^layer 12: width 0.6 rounds to 0 at multiple 32; choose a milder shape or a lower",
        ),
        ({"multiple": 512}, r"^layer 12: width 192.0 rounds to 0 at multiple 512; choose a milder shape or a lower"),
        ({"multiple": 0}, r"^multiple: expected above 0, got 0"),
        ({"multiple": 1.5}, r"^multiple: expected a whole number.*; got 1.5$"),
        ({"turn": 1}, r"^turn: expected a layer from 2 to 15 of 16, got 1$"),
        ({"turn": 16}, r"^turn: expected a layer from 2 to 15 of 16, got 16$"),
        ({"turn": 0}, r"^turn: "),
        ({"layers": 2}, r"^layers: expected from 3 to 10000 where the width turns inside, got 2"),
        ({"layers": 0}, r"^layers: expected from 3 to 10000 where the width turns inside, got 0"),
        ({"layers": 10**9}, r"^layers: expected from 3 to 10000 where the width turns inside, got 1000000000"),
        ({"width": 0}, r"^width: expected above 0, got 0"),
        ({"width": 10**12}, r"^width: expected at most "),
        ({"heads": 0}, r"^heads: expected above 0, got 0"),
        ({"heads": [16, 16]}, r"^heads: expected a whole number; got \[16, 16\]"),
        ({"kv_heads": 0}, r"^kv_heads: expected above 0"),
        ({"kv_heads": 5}, r"layer 1: 5 key/value heads do not divide 16 heads"),
        ({"head_dim": 0}, r"^head_dim: expected above 0"),
        ({"mlp_ratio": 0}, r"^mlp_ratio: expected above 0"),
        ({"mlp_ratio": float("inf")}, r"^mlp_ratio: expected at most"),
        ({"mlp_hidden": -1}, r"^mlp_hidden: expected at least 0, got -1"),
        ({"match": "flop"}, r"^match: expected 'effective', 'parameters', 'flops' or 'kv'; got 'flop'"),
    ],
)
def test_nonsense_is_refused_in_one_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(EntasisError, match=line) as caught:
        bowtie(**({"layers": 16, "width": 640, "heads": 16} | changes))
    assert "\n" not in str(caught.value)
