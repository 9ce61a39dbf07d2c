"""Every finding, at its layer and with its numbers, and none where there is nothing to find."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from entasis.errors import ShapeError
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape
from entasis.shape.rules import (
    RECOMPILE_LIMIT,
    Finding,
    divides_width,
    divisors,
    errors_first,
    findings,
    prism_rules,
    require_no_errors,
    require_valid,
)

LLAMA = ModelConfig(97, 16, "llama")
GPT2 = ModelConfig(97, 16, "gpt2")
SOUND = LayerShape(width=64, heads=4, kv_heads=2, head_dim=16, mlp_hidden=128)


def with_second(**changes: Any) -> Shape:
    """Three sound layers, the second changed."""
    return Shape((SOUND, dataclasses.replace(SOUND, **changes), SOUND), 64)


def said(shape: Shape, config: ModelConfig = LLAMA) -> list[tuple[str, int | None, str]]:
    return [(finding.level, finding.layer, finding.message) for finding in findings(shape, config)]


def test_a_sound_shape_has_no_findings() -> None:
    for config in (LLAMA, GPT2):
        assert said(Shape((SOUND,) * 4, 64), config) == []
        require_valid(Shape((SOUND,) * 4, 64), config)


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"kv_heads": 3}, "3 key/value heads do not divide 4 heads; near choices: 1, 2, 4"),
    ({"kv_heads": 8}, "8 key/value heads do not divide 4 heads; near choices: 1, 2, 4"),
    ({"kv_heads": 0}, "0 key/value heads do not divide 4 heads; near choices: 1, 2, 4"),
    ({"heads": 0}, "2 key/value heads without query heads; a layer without attention has kv_heads 0"),
    ({"head_dim": 0}, "head_dim 0 with 4 heads; a head needs at least one coordinate"),
    ({"heads": 0, "kv_heads": 0, "window": 8}, "window 8 without heads; a layer without attention has no window"),
    ({"experts": 4}, "experts_per_token 0 of 4 experts; choose from 1 to 4"),
    ({"experts": 4, "experts_per_token": 5}, "experts_per_token 5 of 4 experts; choose from 1 to 4"),
    ({"experts_per_token": 1}, "experts_per_token 1 without experts; set experts, or leave both at 0 for a dense MLP"),
    ({"experts": 4, "experts_per_token": 2, "mlp_hidden": 0}, "experts 4 with mlp_hidden 0; an expert needs"),
]


@pytest.mark.parametrize(("changes", "message"), ERRORS)
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_each_error_names_its_layer(changes: dict[str, Any], message: str, config: ModelConfig) -> None:
    shape = with_second(**changes)
    errors = [(layer, text) for level, layer, text in said(shape, config) if level == "error"]
    assert len(errors) == 1
    assert errors[0][0] == 2
    assert errors[0][1].startswith(message)
    with pytest.raises(ShapeError, match=r"^layer 2: ") as caught:
        require_valid(shape, config)
    assert "\n" not in str(caught.value)


def test_windows_end_at_the_token_itself() -> None:
    shape = with_second(window=8)
    require_valid(shape, LLAMA)
    with pytest.raises(ShapeError, match=r"^layer 2: window 8: .* causal: true"):
        require_valid(shape, dataclasses.replace(LLAMA, causal=False))


def test_experts_that_one_kernel_cannot_multiply() -> None:
    assert said(with_second(experts=4, experts_per_token=2)) == []
    assert said(with_second(experts=4, experts_per_token=4, mlp_hidden=44)) == [
        ("warning", 2, "expert size 44 is no multiple of 8: experts are multiplied one after another, "
                       "not in one kernel")
    ]  # fmt: skip
    assert said(with_second(mlp_hidden=44)) == []


def test_rotary_positions_need_even_head_dims() -> None:
    errors = [each for each in said(with_second(head_dim=15)) if each[0] == "error"]
    assert [layer for _, layer, _ in errors] == [2]
    assert errors[0][2].startswith("head dim 15 is odd, rotary positions turn pairs")
    require_valid(with_second(head_dim=15), GPT2)
    require_valid(with_second(head_dim=15), dataclasses.replace(LLAMA, positions="learned"))
    require_valid(with_second(value_dim=15), LLAMA)  # values are not turned


def test_tied_tables_are_equally_wide() -> None:
    shape = Shape((SOUND,), 64, 48)
    found = [each for each in said(shape, GPT2) if each[0] == "error"]
    assert found == [
        ("error", None, "embed_width 64 and unembed_width 48 differ, but tied embeddings share one table; "
                        "make them equal or set tied: false")
    ]  # fmt: skip
    require_valid(shape, LLAMA)
    require_valid(Shape((SOUND,), 64, 64), GPT2)


def test_layers_without_attention_or_without_mlp_are_valid() -> None:
    shape = Shape((LayerShape(64, 0, 0, 0, 128), LayerShape(64, 4, 2, 16, 0)), 64)
    assert said(shape) == []


def test_a_layer_with_neither_is_pointed_out() -> None:
    assert said(with_second(heads=0, kv_heads=0, mlp_hidden=0)) == [
        ("warning", 2, "has neither attention nor MLP, so it changes nothing")
    ]


@pytest.mark.parametrize(
    ("head_dim", "messages"),
    [
        (8, []), (64, []), (128, []), (256, []),
        (4, ["head dim 4 is no multiple of 8: kernels pad it"]),
        (12, ["head dim 12 is no multiple of 8: kernels pad it"]),
        (40, ["head dim 40 is no power of two: kernels may lose alignment"]),
        (72, ["head dim 72 is no power of two: kernels may lose alignment"]),
        (264, ["head dim 264 is above 256: fused attention kernels fall back to a slow one",
               "head dim 264 is no power of two: kernels may lose alignment"]),
        (258, ["head dim 258 is above 256: fused attention kernels fall back to a slow one",
               "head dim 258 is no multiple of 8: kernels pad it"]),
        (512, ["head dim 512 is above 256: fused attention kernels fall back to a slow one"]),
    ],
)  # fmt: skip
def test_head_dims_that_kernels_dislike(head_dim: int, messages: list[str]) -> None:
    assert said(with_second(head_dim=head_dim)) == [("warning", 2, message) for message in messages]


def test_value_dims_that_kernels_dislike_are_named_as_such() -> None:
    assert said(with_second(value_dim=20)) == [("warning", 2, "value dim 20 is no multiple of 8: kernels pad it")]
    assert said(with_second(value_dim=16)) == []


@pytest.mark.parametrize(("distinct", "warned"), [(1, False), (RECOMPILE_LIMIT, False), (RECOMPILE_LIMIT + 1, True)])
def test_more_distinct_layers_than_the_compiler_takes(distinct: int, warned: bool) -> None:
    layers = [dataclasses.replace(SOUND, mlp_hidden=128 + n) for n in range(distinct)]
    found = said(Shape(tuple(layers * 2), 64))
    assert bool(found) == warned
    if warned:
        assert found[0][:2] == ("warning", None)
        assert found[0][2].startswith(f"{distinct} distinct layer shapes; the compiler's recompile limit is 8")


def test_errors_come_first_and_the_rest_are_counted() -> None:
    shape = Shape((dataclasses.replace(SOUND, head_dim=12), *with_second(kv_heads=3, experts=4).layers), 64)
    found = findings(shape, LLAMA)
    assert [finding.level for finding in found] == ["error", "error", "warning"]
    with pytest.raises(ShapeError, match=r"^layer 3: experts_per_token 0 .* \(and 1 more error\)$"):
        require_no_errors(found)
    warning = Finding("warning", 1, "a")
    error = Finding("error", None, "b")
    assert errors_first([warning, error]) == [error, warning]
    assert (str(warning), str(error)) == ("layer 1: a", "b")
    require_no_errors([warning])


def test_heads_that_do_not_divide_a_width() -> None:
    shape = Shape((SOUND, dataclasses.replace(SOUND, heads=5), dataclasses.replace(SOUND, heads=0)), 64)
    found = divides_width(shape)
    assert [(each.level, each.layer, each.message) for each in found] == [
        ("error", 2, "5 heads do not divide width 64; near choices: 2, 4, 8")
    ]


def test_divisors() -> None:
    for number in range(1, 200):
        assert divisors(number) == {d for d in range(1, number + 1) if number % d == 0}


# --- the Prism Transformer's rules ------------------------------------------------------------------------------------


def prism_shape(heads: list[int], width: int = 768) -> Shape:
    return Shape(tuple(LayerShape(width, count, count, width // count, 64) for count in heads), width)


def prism_said(heads: list[int], baseline: int = 12) -> list[tuple[str, int | None, str]]:
    return [(each.level, each.layer, each.message) for each in prism_rules(prism_shape(heads), baseline)]


KNOWN_GOOD = [
    [3] * 2 + [6] * 2 + [12] * 8,
    [3] * 2 + [6] * 3 + [12] * 7,
    [3] * 3 + [6] * 2 + [12] * 7,
    [3] * 2 + [6] * 4 + [12] * 6,
    [3] * 3 + [6] * 3 + [12] * 6,
    [3] * 4 + [6] * 2 + [12] * 6,
    [12] * 12,
]


@pytest.mark.parametrize("heads", KNOWN_GOOD, ids=str)
def test_schedules_that_keep_every_rule(heads: list[int]) -> None:
    assert prism_said(heads) == []


@pytest.mark.parametrize(("hold", "warned"), [(1, True), (2, False), (3, False), (4, False), (5, True)])
def test_the_first_head_dim_is_held_for_two_to_four_layers(hold: int, warned: bool) -> None:
    expected = f"head dim 256 is held for {hold} layer{'s' if hold > 1 else ''}; Prism's guideline is 2 to 4"
    assert prism_said([3] * hold + [12] * 12) == ([("warning", 1, expected)] if warned else [])


@pytest.mark.parametrize(("hold", "warned"), [(1, True), (2, False), (4, False), (5, True)])
def test_so_is_the_next_one(hold: int, warned: bool) -> None:
    found = prism_said([3] * 2 + [6] * hold + [12] * 12)
    assert [(level, layer) for level, layer, _ in found] == ([("warning", 3)] if warned else [])


def test_the_baseline_may_be_held_as_long_as_it_likes() -> None:
    assert prism_said([3, 3] + [12] * 30) == []


@pytest.mark.parametrize(
    ("below", "kept", "warned"), [(6, 6, False), (6, 5, True), (6, 7, False), (5, 5, False), (5, 4, True), (4, 3, True)]
)
def test_at_least_half_of_the_layers_keep_the_baseline(below: int, kept: int, warned: bool) -> None:
    heads = [3] * (below // 2) + [6] * (below - below // 2) + [12] * kept
    found = prism_said(heads)
    message = f"{kept} of {below + kept} layers have the baseline's 12 heads; Prism's guideline is at least half"
    assert found == ([("warning", None, message)] if warned else [])


def test_falling_heads_are_errors_where_they_fall() -> None:
    found = [each for each in prism_said([3, 3, 12, 12, 6, 6, 12, 12, 12, 12]) if each[0] == "error"]
    assert [layer for _, layer, _ in found] == [5]
    assert found[0][2].startswith("6 heads after 12")
    assert [each[:2] for each in prism_said([3, 3, 2, 2, 12, 12, 12, 12])] == [("error", 3)]  # by one is too much


def test_the_last_layer_has_the_baseline() -> None:
    found = [each for each in prism_said([3, 3, 6, 6, 6, 6]) if each[0] == "error"]
    assert [(layer, message[:42]) for _, layer, message in found] == [(6, "the last layer has 6 heads, the baseline 1")]
