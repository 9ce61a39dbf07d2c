"""Families by name: what they build by default, what they take and refuse, what they are compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import entasis
from entasis.errors import ConfigError, EntasisError, ShapeError
from entasis.shape.columns import column, straightened
from entasis.shape.families import bowtie, design, explicit, families, family, family_settings, prism, uniform
from entasis.shape.match import Match, matched
from entasis.shape.model_config import ModelConfig
from entasis.shape.profiles import PROFILES, profile
from entasis.shape.records import LayerShape, Shape
from entasis.shape.registry import FAMILIES, Design, register_family

SCHEDULE = [3, 3, 3, 6, 6, 6, 12, 12, 12, 12, 12, 12]


def errors(made: Design) -> list[tuple[int | None, str]]:
    return [(finding.layer, finding.message) for finding in made.findings if finding.level == "error"]


def heads_of(shape: Shape) -> list[tuple[int, int, int]]:
    return [(layer.heads, layer.kv_heads, layer.head_dim) for layer in shape.layers]


# --- uniform ----------------------------------------------------------------------------------------------------------


def test_uniform_defaults() -> None:
    shape = uniform(layers=3, width=48, heads=4)
    assert shape == Shape((LayerShape(48, 4, 4, 12, 192),) * 3, 48)
    made = design("uniform", {"layers": 3, "width": 48, "heads": 4})
    assert made.family == "uniform"
    assert made.shape == made.reference == shape


@pytest.mark.parametrize(
    ("settings", "layer"),
    [
        ({"kv_heads": 2}, LayerShape(48, 4, 2, 12, 192)),
        ({"head_dim": 16}, LayerShape(48, 4, 4, 16, 192)),
        ({"heads": 5, "kv_heads": 1, "head_dim": 6}, LayerShape(48, 5, 1, 6, 192)),
        ({"mlp_ratio": 8 / 3}, LayerShape(48, 4, 4, 12, 128)),
        ({"mlp_ratio": 2}, LayerShape(48, 4, 4, 12, 96)),
        ({"mlp_hidden": 100}, LayerShape(48, 4, 4, 12, 100)),
        ({"mlp_hidden": 0}, LayerShape(48, 4, 4, 12, 0)),
        ({"mlp_hidden": 100, "mlp_ratio": 2}, LayerShape(48, 4, 4, 12, 100)),
    ],
)
def test_uniform_settings(settings: dict[str, Any], layer: LayerShape) -> None:
    assert uniform(**({"layers": 2, "width": 48, "heads": 4} | settings)) == Shape((layer, layer), 48)


def test_heads_must_divide_the_width_they_slice() -> None:
    made = design("uniform", {"layers": 2, "width": 48, "heads": 5})
    assert errors(made)[0] == (1, "5 heads do not divide width 48; near choices: 3, 4, 6")
    assert errors(made)[1][0] == 2
    with pytest.raises(ShapeError, match=r"^layer 1: 5 heads do not divide width 48; .* \(and 3 more errors\)$"):
        uniform(layers=2, width=48, heads=5)
    assert heads_of(uniform(layers=1, width=48, heads=5, head_dim=10)) == [(5, 5, 10)]  # nothing to divide


def test_huge_widths_get_their_line_at_once() -> None:
    made = design("uniform", {"layers": 1, "width": 1_000_000_007, "heads": 12, "mlp_hidden": 1})
    assert "near choices: 1, 1000000007" in errors(made)[0][1]


# --- prism ------------------------------------------------------------------------------------------------------------


def test_prism_takes_its_heads_from_a_list() -> None:
    shape = prism(width=768, heads=SCHEDULE)
    assert heads_of(shape) == [(count, count, 768 // count) for count in SCHEDULE]
    assert {(layer.width, layer.mlp_hidden) for layer in shape.layers} == {(768, 3072)}
    made = design("prism", {"width": 768, "heads": SCHEDULE})
    assert made.reference == uniform(layers=12, width=768, heads=12)
    assert not errors(made)


def test_a_prism_with_every_head_at_the_baseline_is_the_straight_column() -> None:
    assert prism(width=48, heads=4, layers=3) == uniform(layers=3, width=48, heads=4)
    assert prism(width=48, heads=[4, 4, 4]) == uniform(layers=3, width=48, heads=4)


def test_prism_key_value_heads_are_one_number_or_a_list() -> None:
    assert [layer.kv_heads for layer in prism(width=48, heads=[2, 2, 4, 4], kv_heads=2).layers] == [2] * 4
    made = design("prism", {"width": 48, "heads": [2, 2, 4, 4], "kv_heads": [1, 1, 2, 2]})
    assert [layer.kv_heads for layer in made.shape.layers] == [1, 1, 2, 2]
    assert {layer.kv_heads for layer in made.reference.layers} == {2}


@pytest.mark.parametrize(
    ("heads", "settings", "layer", "message"),
    [
        ([4, 4, 2, 2], {}, 3, "2 heads after 4: a prism's head count never falls"),
        ([2, 4, 2, 4], {}, 3, "2 heads after 4"),
        ([2, 2, 4, 4], {"baseline_heads": 8}, 4, "the last layer has 4 heads, the baseline 8"),
        ([5, 5, 8, 8], {}, 1, "5 heads do not divide width 48"),
        ([2, 2, 4, 4], {"kv_heads": [2, 2, 3, 3]}, 3, "3 key/value heads do not divide 4 heads"),
    ],
)
def test_broken_prism_constraints_are_errors_at_their_layer(
    heads: list[int], settings: dict[str, Any], layer: int, message: str
) -> None:
    found = errors(design("prism", {"width": 48, "heads": heads, **settings}))
    assert any(number == layer and text.startswith(message) for number, text in found), found
    with pytest.raises(ShapeError, match=r"^layer \d: "):
        prism(width=48, heads=heads, **settings)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"heads": 4}, r"^layers: missing; a prism with one head count"),
        ({"heads": [2, 4, 4], "layers": 4}, r"^heads: 3 values for 4 layers"),
        ({"heads": [2, 4], "kv_heads": [1]}, r"^kv_heads: 1 values for 2 layers"),
        ({"heads": []}, r"^layers: expected from 1 to 10000, got 0"),
        ({"heads": [0, 4]}, r"^layer 1: heads 0; expected at least 1"),
        ({"heads": [2, -4]}, r"^layer 2: heads -4; expected at least 1"),
        ({"heads": [2, "4"]}, r"^heads.1: expected a whole number; got '4'"),
        ({"heads": [2, 4.0]}, r"^heads.1: expected a whole number.*; got 4.0"),
        ({"heads": "2,4"}, r"^heads: .*; got '2,4'"),
        ({"heads": [2, 4], "baseline_heads": 0}, r"^baseline_heads: expected above 0"),
        ({"heads": [2, 4], "width": 0}, r"^width: expected above 0"),
        ({"heads": [2, 4], "mlp_hidden": -1}, r"^mlp_hidden: expected at least 0"),
        ({"heads": [2, 4], "head_dim": 12}, r"^head_dim: family prism has no such setting"),
    ],
)
def test_nonsense_prisms_are_refused_in_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(EntasisError, match=line) as caught:
        prism(**({"width": 48} | settings))
    assert "\n" not in str(caught.value)


# --- bowtie -----------------------------------------------------------------------------------------------------------


def test_a_bowtie_keeps_its_head_count_and_groups() -> None:
    shape = bowtie(layers=8, width=256, heads=8, kv_heads=2)
    assert {(layer.heads, layer.kv_heads) for layer in shape.layers} == {(8, 2)}
    assert all(layer.heads * layer.head_dim == layer.width for layer in shape.layers)


def test_a_bowtie_of_one_head_dim_has_as_many_heads_as_fit() -> None:
    made = design("bowtie", {"layers": 8, "width": 256, "heads": 8, "kv_heads": 4, "head_dim": 32})
    for layer in (*made.shape.layers, *made.reference.layers):
        assert layer.head_dim == 32
        assert layer.heads == layer.width // 32
        assert layer.heads % layer.kv_heads == 0
        assert layer.heads / layer.kv_heads >= 2 or layer.kv_heads == 1
    assert {layer.heads for layer in made.reference.layers} == {8}
    assert not errors(made)


def test_a_fixed_mlp_stays_fixed() -> None:
    shape = bowtie(layers=8, width=256, heads=8, mlp_hidden=512)
    assert {layer.mlp_hidden for layer in shape.layers} == {512}
    assert shape.layers[0].width > 256


def test_the_style_decides_the_widths() -> None:
    llama = bowtie(layers=16, width=640, heads=1, multiple=2)
    assert llama == bowtie(layers=16, width=640, heads=1, multiple=2, config=ModelConfig(97, 16, "llama"))
    gpt2 = bowtie(layers=16, width=640, heads=1, multiple=2, config=ModelConfig(50_257, 1024, "gpt2"))
    assert gpt2 != llama


def test_default_turns_lie_at_three_quarters() -> None:
    for layers, turn in [(3, 2), (4, 3), (8, 6), (12, 9), (16, 12), (24, 18), (32, 24), (40, 30)]:
        widths = [layer.width for layer in bowtie(layers=layers, width=512, heads=1, multiple=2).layers]
        assert widths.index(min(widths)) + 1 == turn


def test_a_bowtie_says_which_multiple_would_suit_its_heads() -> None:
    made = design("bowtie", {"layers": 16, "width": 640, "heads": 12})
    said = [finding.message for finding in made.findings if finding.level == "warning"]
    assert any(message.startswith("with multiple: 24") for message in said)
    assert any(message.startswith("12 heads do not divide the reference width 640") for message in said)
    assert all(layer is not None for layer, _ in errors(made))
    suited = design("bowtie", {"layers": 16, "width": 640, "heads": 12, "multiple": 24})
    assert not errors(suited)  # only the straight column beside it cannot be built
    with pytest.raises(ShapeError, match=r"^layer \d+: 12 heads do not divide width"):
        bowtie(layers=16, width=640, heads=12)


# --- explicit ---------------------------------------------------------------------------------------------------------

FREE = {"width": 48, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp_hidden": 96}


def test_an_explicit_shape_is_what_is_written() -> None:
    shape = explicit(layers=[FREE, FREE | {"width": 32, "value_dim": 8}], embed_width=40, unembed_width=24)
    assert shape == Shape((LayerShape(48, 4, 2, 16, 96), LayerShape(32, 4, 2, 16, 96, 8)), 40, 24)


@pytest.mark.parametrize(
    ("layers", "line"),
    [
        ([FREE, 3], r"^layer 2: expected an object with width, heads"),
        ([FREE, FREE | {"heads": "four"}], r"^layer 2: heads: expected a whole number, got 'four'"),
        ([FREE, FREE | {"headz": 4}], r"^layer 2: unknown field 'headz' \(did you mean 'heads'\?\)"),
        ([FREE, {"width": 3}], r"^layer 2: heads: missing"),
        ([], r"^layers: a shape needs at least one layer"),
        ("abc", r"^layers: expected a list with one object per layer; got 'abc'"),
        (3, r"^layers: expected a list; got 3"),
        ([FREE, FREE | {"experts": 4}], r"^layer 2: experts_per_token 0 of 4 experts"),
    ],
)
def test_explicit_nonsense_is_refused_at_its_layer(layers: Any, line: str) -> None:
    with pytest.raises(EntasisError, match=line):
        explicit(layers=layers, embed_width=48)


def test_the_reference_of_a_free_shape_is_straight() -> None:
    sliced = LayerShape(64, 4, 2, 16, 256)
    wide = LayerShape(96, 4, 2, 24, 384)
    assert straightened(Shape((sliced, wide, sliced), 48)) == Shape((LayerShape(48, 4, 2, 12, 192),) * 3, 48)
    free = LayerShape(48, 4, 2, 16, 96)  # its heads are wider than its width
    assert straightened(Shape((free, free), 48)) == Shape((free, free), 48)
    values = LayerShape(48, 4, 2, 12, 96, value_dim=6)
    assert straightened(Shape((values,), 48)) == Shape((values,), 48)
    bare = LayerShape(48, 0, 0, 0, 96)
    assert straightened(Shape((bare,), 32)) == Shape((LayerShape(32, 0, 0, 0, 64),), 32)


@pytest.mark.parametrize("settings", [{"kv_heads": 2}, {"head_dim": 20}, {"mlp_hidden": 0}, {"mlp_ratio": 2.5}])
def test_a_straight_shape_is_its_own_reference(settings: dict[str, Any]) -> None:
    shape = uniform(layers=3, width=48, heads=4, **settings)
    assert straightened(shape) == shape
    assert design("explicit", shape.to_dict()).reference == shape


# --- by name ----------------------------------------------------------------------------------------------------------


def test_the_public_names_build_the_same_shapes() -> None:
    assert entasis.family("uniform", layers=2, width=48, heads=4) == entasis.uniform(layers=2, width=48, heads=4)
    assert family("prism", width=48, heads=[2, 2, 4, 4]) == entasis.prism(width=48, heads=[2, 2, 4, 4])
    assert family("bowtie", layers=8, width=256, heads=8) == entasis.bowtie(layers=8, width=256, heads=8)
    assert family("explicit", layers=[FREE], embed_width=48) == entasis.explicit(layers=[FREE], embed_width=48)


def test_unknown_families_and_settings_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"^family: unknown family 'bowtei'.*known: all-wide, bowtie, crown, diamond, explicit, "
    ):
        family("bowtei")
    with pytest.raises(ConfigError, match=r"^turm: family bowtie has no such setting \(did you mean 'turn'\?\)"):
        bowtie(layers=8, width=256, heads=8, turm=3)
    with pytest.raises(ConfigError, match=r"^width: missing; family uniform needs it"):
        family("uniform", layers=3, heads=3)
    with pytest.raises(ConfigError, match=r"^config: family uniform has no such setting"):
        design("uniform", {"layers": 1, "width": 4, "heads": 1, "config": None})


@pytest.fixture
def forget() -> Iterator[Callable[[str], None]]:
    names: list[str] = []
    yield names.append
    for name in names:
        FAMILIES.pop(name, None)


def test_every_family_says_what_it_is_and_takes_its_defaults() -> None:
    assert list(families()) == sorted(FAMILIES)
    names = (
        "uniform explicit prism prism-reversed prism-abrupt all-wide bowtie diamond growing narrowing prism-bowtie "
        "half-first tapered openelm crown frame reverse"
    )
    assert set(names.split()) <= set(families())
    special = {"prism-abrupt": {"early_heads": 3, "early_layers": 6}, "all-wide": {"wide_heads": 3}}
    for name, build in families().items():
        assert (build.__doc__ or "").strip(), name
        if name == "explicit":
            continue
        settings: dict[str, Any] = {"layers": 12, "width": 768, "heads": 16, **special.get(name, {})}
        made = design(name, {key: value for key, value in settings.items() if key in family_settings(name)})
        assert not errors(made), name
        assert len(made.shape.layers) == len(made.reference.layers) == 12
        assert made.reference.distinct_layers == 1


def test_a_family_can_come_from_outside(forget: Callable[[str], None]) -> None:
    forget("ladder")

    @register_family("ladder")
    def ladder(*, layers: int, width: int, step=8, config: ModelConfig) -> Design:  # type: ignore[no-untyped-def]  # noqa: ANN001
        """Each layer a little wider, with heads of 7."""
        shape = Shape(tuple(LayerShape(width + step * n, 1, 1, 7, 16) for n in range(layers)), width)
        return Design("whatever", shape, straightened(shape))

    assert family_settings("ladder") == ("layers", "width", "step")
    made = design("ladder", {"layers": 3, "width": 16, "step": 4})
    assert made.family == "ladder"
    assert [layer.width for layer in made.shape.layers] == [16, 20, 24]
    assert [layer for layer, _ in errors(made)] == [1, 2, 3]  # the general rules are applied to it: 7 is odd
    with pytest.raises(ConfigError, match=r"^layers: expected a whole number; got 'x'"):
        design("ladder", {"layers": "x", "width": 16})
    with pytest.raises(ShapeError, match=r"^layer 1: head dim 7 is odd"):
        entasis.family("ladder", layers=3, width=16)
    gpt2 = ModelConfig(97, 16, "gpt2")
    assert (
        entasis.family("ladder", layers=3, width=16, config=gpt2) == design("ladder", {"layers": 3, "width": 16}).shape
    )


def test_a_family_from_outside_can_combine_profiles_and_be_matched(forget: Callable[[str], None]) -> None:
    forget("wave")
    try:

        @profile("wave")
        def wave(layers: int, first: float, last: float) -> list[float]:
            return [first if number % 2 == 0 else last for number in range(layers)]

        @register_family("wave")
        def wave_family(
            *, layers: int, width: int, heads: int, match: Match = "effective", config: ModelConfig
        ) -> Design:
            """Every second layer has a wide MLP."""
            reference = column(layers, width, heads)

            def build(scale: float) -> Shape:
                hidden = [round(scale * share * 4 * width) for share in wave(layers, 1.5, 0.5)]
                return Shape(tuple(dataclasses.replace(reference.layers[0], mlp_hidden=each) for each in hidden), width)

            return Design("wave", matched(build, reference, match, config), reference)

        shape = entasis.family("wave", layers=4, width=64, heads=4)
        assert [layer.mlp_hidden for layer in shape.layers] == [384, 128, 384, 128]
        tapered = entasis.family("tapered", layers=4, width=64, heads=4, curve="wave")
        assert tapered == shape
        assert "wave" in families()
    finally:
        PROFILES.pop("wave", None)
