"""The two records: what they hold, what they refuse, and that text and back loses nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entasis.errors import EntasisError, ShapeError
from entasis.shape.records import LARGEST_SIZE, LayerShape, Shape

LAYER = LayerShape(width=48, heads=4, kv_heads=2, head_dim=12, mlp_hidden=128)
SIZES = st.integers(0, 4096)


@st.composite
def layers(draw: st.DrawFn) -> LayerShape:
    return LayerShape(
        width=draw(st.integers(1, 4096)),
        heads=draw(SIZES),
        kv_heads=draw(SIZES),
        head_dim=draw(SIZES),
        mlp_hidden=draw(SIZES),
        value_dim=draw(st.none() | st.integers(1, 512)),
        window=draw(st.none() | st.integers(1, 4096)),
        experts=draw(SIZES),
        experts_per_token=draw(SIZES),
    )


SHAPES = st.builds(
    Shape,
    layers=st.lists(layers(), min_size=1, max_size=6).map(tuple),
    embed_width=st.integers(1, 4096),
    unembed_width=st.none() | st.integers(1, 4096),
)


def plain(**changes: Any) -> dict[str, Any]:
    """A valid shape of two layers as plain data; `changes` go into the second layer."""
    layer = {"width": 48, "heads": 4, "kv_heads": 2, "head_dim": 12, "mlp_hidden": 128}
    return {"layers": [layer, layer | changes], "embed_width": 48}


@settings(deadline=None)
@given(SHAPES)
def test_text_and_back_loses_nothing(shape: Shape) -> None:
    assert Shape.from_dict(shape.to_dict()) == shape
    assert Shape.from_json(shape.to_json()) == shape
    assert Shape.from_yaml(shape.to_yaml()) == shape


def test_plain_data_writes_every_field_out() -> None:
    data = Shape((LAYER,), 48).to_dict()
    assert list(data) == ["layers", "embed_width", "unembed_width"]
    assert list(data["layers"][0]) == [field.name for field in dataclasses.fields(LayerShape)]
    assert data["layers"][0]["value_dim"] is None


def test_fields_with_a_default_may_be_left_out() -> None:
    shape = Shape.from_dict(plain())
    assert shape.layers == (LAYER, LAYER)
    assert shape.unembed_width is None


def test_records_cannot_be_changed_and_serve_as_keys() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LAYER.width = 3  # type: ignore[misc]
    assert len({Shape((LAYER,), 48), Shape((LAYER,), 48), Shape((LAYER,), 32)}) == 2


def test_derived_sizes() -> None:
    layer = LayerShape(width=48, heads=4, kv_heads=2, head_dim=10, mlp_hidden=0, value_dim=6)
    assert layer.value_head_dim == 6
    assert layer.qkv_width == 4 * 10 + 2 * 10 + 2 * 6
    assert layer.has_attention
    assert not layer.has_mlp
    assert LAYER.value_head_dim == 12
    assert not LayerShape(8, 0, 0, 0, 4).has_attention


@pytest.mark.parametrize(
    ("widths", "embed", "unembed", "stream"),
    [((16, 8), 32, None, 32), ((16, 64), 32, None, 64), ((16, 8), 32, 96, 96), ((16, 8), 8, 8, 16)],
)
def test_the_stream_is_as_wide_as_its_widest_user(
    widths: tuple[int, ...], embed: int, unembed: int | None, stream: int
) -> None:
    shape = Shape(tuple(LayerShape(width, 1, 1, 4, 8) for width in widths), embed, unembed)
    assert shape.stream_width == stream
    assert shape.head_width == (unembed or embed)


def test_distinct_layers_counts_records() -> None:
    narrow = dataclasses.replace(LAYER, width=32)
    assert Shape((LAYER, narrow, LAYER, narrow), 48).distinct_layers == 2


def test_a_list_of_layers_becomes_a_tuple() -> None:
    shape = Shape([LAYER, LAYER], 48)  # type: ignore[arg-type]
    assert shape.layers == (LAYER, LAYER)
    assert hash(shape) == hash(Shape((LAYER, LAYER), 48))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(LayerShape)])
@pytest.mark.parametrize("value", ["4", 4.0, True, [4], -1, LARGEST_SIZE + 1])
def test_a_wrong_size_names_layer_and_field(field: str, value: object) -> None:
    with pytest.raises(ShapeError, match=rf"^layer 2: {field}: expected ") as caught:
        Shape.from_dict(plain(**{field: value}))
    assert caught.value.layer == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["width", "window", "value_dim"])
def test_some_sizes_cannot_be_zero(field: str) -> None:
    with pytest.raises(ShapeError, match=rf"layer 2: {field}: expected at least 1, got 0"):
        Shape.from_dict(plain(**{field: 0}))


@pytest.mark.parametrize("field", ["heads", "kv_heads", "head_dim", "mlp_hidden", "experts", "experts_per_token"])
def test_the_other_sizes_can(field: str) -> None:
    assert getattr(Shape.from_dict(plain(**{field: 0})).layers[1], field) == 0


@pytest.mark.parametrize("field", ["width", "heads", "kv_heads", "head_dim", "mlp_hidden"])
def test_only_two_sizes_can_be_left_to_their_default(field: str) -> None:
    with pytest.raises(ShapeError, match=rf"layer 2: {field}: expected a whole number, got None"):
        Shape.from_dict(plain(**{field: None}))
    data = plain()
    data["layers"][1] = {name: value for name, value in data["layers"][1].items() if name != field}
    with pytest.raises(ShapeError, match=rf"layer 2: {field}: missing"):
        Shape.from_dict(data)


@pytest.mark.parametrize("value", [0, -3, 1.5, "48", False, None])
def test_a_wrong_embedding_width_is_named(value: object) -> None:
    with pytest.raises(ShapeError, match=r"^embed_width: expected "):
        Shape.from_dict(plain() | {"embed_width": value})


@pytest.mark.parametrize("value", [0, -3, 1.5, "48", False])
def test_a_wrong_head_width_is_named(value: object) -> None:
    with pytest.raises(ShapeError, match=r"^unembed_width: expected "):
        Shape.from_dict(plain() | {"unembed_width": value})


def test_unknown_fields_are_named_with_the_nearest_known_one() -> None:
    with pytest.raises(ShapeError, match=r"layer 2: unknown field 'head' \(did you mean 'heads'\?\); known: width,"):
        Shape.from_dict(plain(head=3))
    with pytest.raises(ShapeError, match=r"^unknown field 'embed_widht' \(did you mean 'embed_width'\?\)"):
        Shape.from_dict(plain() | {"embed_widht": 3})
    with pytest.raises(ShapeError, match=r"layer 2: unknown field 7"):
        Shape.from_dict({"layers": [plain()["layers"][0], {7: 1}], "embed_width": 4})


def test_missing_parts_are_named() -> None:
    with pytest.raises(ShapeError, match=r"^embed_width: missing"):
        Shape.from_dict({"layers": plain()["layers"]})
    with pytest.raises(ShapeError, match=r"^layers: missing"):
        Shape.from_dict({"embed_width": 3})
    with pytest.raises(ShapeError, match=r"^layers: a shape needs at least one layer"):
        Shape.from_dict({"embed_width": 3, "layers": []})


@pytest.mark.parametrize("value", [3, "abc", {"width": 3}, None])
def test_layers_must_be_a_list(value: object) -> None:
    with pytest.raises(ShapeError, match=r"^layers: expected a list"):
        Shape.from_dict({"embed_width": 3, "layers": value})


@pytest.mark.parametrize("value", [3, "abc", None, [1, 2]])
def test_a_layer_must_be_an_object(value: object) -> None:
    with pytest.raises(ShapeError, match=r"^layer 1: expected an object with width, "):
        Shape.from_dict({"embed_width": 3, "layers": [value]})


def test_plain_data_is_no_layer() -> None:
    with pytest.raises(ShapeError, match=r"^layer 1: expected a LayerShape"):
        Shape(({"width": 48},), 48)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["x", "3", "null", "[1, 2]", '"x"', "true"])
def test_text_that_holds_no_object_ends_in_one_line(text: str) -> None:
    for read in (Shape.from_yaml, Shape.from_json) if text != "x" else (Shape.from_yaml,):
        with pytest.raises(ShapeError, match=r"^a shape is an object with layers, embed_width, unembed_width; got"):
            read(text)


@pytest.mark.parametrize("text", ["", "{", "x", '{"layers": [}', '{"embed_width": 1, "embed_width": 2}', "[" * 100_000])
def test_text_that_is_no_json_ends_in_one_line(text: str) -> None:
    with pytest.raises(EntasisError, match=r"^shape: ") as caught:
        Shape.from_json(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["a: [", "a: 1\na: 2", "!!python/object/apply:os.getcwd []", "a: &a [*a]", "\0"])
def test_text_that_is_no_yaml_ends_in_one_line(text: str) -> None:
    with pytest.raises(EntasisError, match=r"^shape: ") as caught:
        Shape.from_yaml(text)
    assert "\n" not in str(caught.value)


def test_errors_stay_short_whatever_was_given() -> None:
    with pytest.raises(ShapeError) as caught:
        Shape.from_dict({"embed_width": 3, "layers": [list(range(100_000))]})
    assert len(str(caught.value)) < 300
