"""Each way of joining widths, against the list of all earlier states; and that carrying knows nothing of the others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from entasis.errors import ShapeError
from entasis.model.init import initialize
from entasis.model.transformer import Transformer
from entasis.shape.budget import budget
from entasis.shape.families import bowtie
from entasis.shape.model_config import ModelConfig, Resize, Style
from entasis.shape.records import LayerShape, Shape
from entasis.shape.stream import as_built

LEARNED: tuple[Resize, ...] = ("projection", "projection-missing", "gated")
OTHERS: tuple[Resize, ...] = ("zero", *LEARNED, "interpolation")
SHAPES = {
    "x": (48, 32, 16, 32, 56),
    "diamond": (24, 40, 56, 40, 24),
    "growing": (16, 24, 40, 64),
    "narrowing": (64, 48, 32, 16),
    "to and fro": (48, 20, 36, 16, 28, 60, 24),
    "constant": (36, 36),
}
styles = pytest.mark.parametrize("style", get_args(Style))
shapes = pytest.mark.parametrize("shape", SHAPES)
others = pytest.mark.parametrize("resize", OTHERS)


def shape_of(*widths: int, embed_width: int = 36, unembed_width: int | None = None) -> Shape:
    layers = tuple(
        LayerShape(width=w, heads=2, kv_heads=1, head_dim=8, mlp_hidden=2 * w, value_dim=6 if w == 32 else None)
        for w in widths
    )
    return Shape(layers, embed_width, unembed_width)


def settings(resize: Resize, style: Style = "llama") -> ModelConfig:
    return ModelConfig(vocab_size=97, context=16, style=style, tied=False, resize=resize)


def random_model(shape: Shape, config: ModelConfig) -> Transformer:
    """In float64, every parameter away from its start, so that no gate is a half and no norm weight one."""
    model = Transformer(shape, config).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.3)
    return model


def random_tokens(*size: int) -> Tensor:
    return torch.randint(97, size, generator=torch.Generator().manual_seed(1))


def from_states(states: list[Tensor], width: int, resize: Resize, weights: Mapping[str, Tensor], last: bool) -> Tensor:
    """The next input of `width` coordinates from all states so far, newest last; one coordinate at a time."""
    newest = states[-1]
    before = newest.shape[-1]
    if resize == "projection":
        return newest if width == before else newest @ weights["projection.weight"].T
    if resize == "interpolation":
        return newest if width == before else torch.stack([sample(newest, c, width) for c in range(width)], dim=-1)
    columns = []
    for coordinate in range(width):
        holders = [state for state in states if coordinate < state.shape[-1]]
        if coordinate < before:
            columns.append(newest[..., coordinate])
        elif resize == "projection-missing":
            columns.append(newest @ weights["projection.weight"][coordinate - before])
        elif not holders or (resize == "zero" and not last):
            columns.append(torch.zeros_like(newest[..., 0]))
        elif resize == "zero":
            columns.append(holders[-1][..., coordinate])
        else:
            gate = weights["gate"][coordinate - before]
            columns.append(holders[-1][..., coordinate] / (1 + math.exp(-gate.item())))
    return torch.stack(columns, dim=-1)


def sample(state: Tensor, coordinate: int, width: int) -> Tensor:
    """The state at the place that `coordinate` of `width` has on the line from its first to its last coordinate."""
    place = coordinate / (width - 1) * (state.shape[-1] - 1)
    left = min(int(place), state.shape[-1] - 2)
    return state[..., left] + (place - left) * (state[..., left + 1] - state[..., left])


def naive_hidden(model: Transformer, tokens: Tensor) -> Tensor:
    """By the list of all states. The blocks are the model's own; only what they are given is in question here."""
    resize, steps = model.config.resize, model.resizes
    assert steps is not None
    weights = [dict(step.named_parameters()) for step in steps]
    state = model.embed(tokens)
    if model.positions is not None:
        state = state + model.positions.weight[: tokens.shape[1]]
    rotations = model._rotations(torch.arange(tokens.shape[1])[None])
    states = [state]
    for number, (layer, block) in enumerate(model.blocks()):
        state = from_states(states, layer.width, resize, weights[number], last=False)
        if block.attention is not None:  # what its projections leave out must be zero
            assert not state[..., block.attention.qkv.in_width :].any() or model.config.norm == "layernorm"
        states.append(block(state, rotations.get(layer.head_dim), None)[0])
    final = [*states[:-1], model.norm(states[-1])]
    return from_states(final, model.shape.head_width, resize, weights[-1], last=True)


@styles
@shapes
@others
@pytest.mark.parametrize("unembed_width", [20, 36, 60])
def test_every_resize_equals_the_list_of_states(resize: Resize, shape: str, style: Style, unembed_width: int) -> None:
    model = random_model(shape_of(*SHAPES[shape], unembed_width=unembed_width), settings(resize, style))
    tokens = random_tokens(2, 7)
    with torch.no_grad():
        torch.testing.assert_close(model.hidden(tokens), naive_hidden(model, tokens), rtol=0, atol=1e-10)


@others
def test_no_two_resizes_are_the_same(resize: Resize) -> None:
    tokens, shape = random_tokens(1, 7), shape_of(*SHAPES["x"])
    answers = {}
    for method in ("carry", *OTHERS):
        # Under LayerNorm nothing is trimmed, so that all start with the same numbers.
        answers[method] = Transformer(shape, settings(method, "gpt2"))(tokens)
    assert all((answers[resize] - answers[method]).abs().max() > 1e-3 for method in answers if method != resize)


@styles
@others
def test_a_uniform_shape_is_the_same_under_every_resize(resize: Resize, style: Style) -> None:
    shape, tokens = shape_of(36, 36, 36), random_tokens(2, 16)
    carried, other = Transformer(shape, settings("carry", style)), Transformer(shape, settings(resize, style))
    assert carried.state_dict().keys() == other.state_dict().keys()
    assert torch.equal(carried(tokens), other(tokens))


def test_carrying_holds_no_modules_of_other_resizes() -> None:
    for resize in ("carry", "constant"):
        model = Transformer(shape_of(*SHAPES["x"]), settings(resize))
        assert model.resizes is None
        assert not any(name.startswith("resizes") for name in model.state_dict())


@pytest.mark.parametrize(
    ("resize", "expected"),
    [
        ("zero", {}),
        ("interpolation", {}),
        (
            "projection",
            {
                "resizes.0.projection.weight": (48, 36),
                "resizes.1.projection.weight": (16, 48),
                "resizes.3.projection.weight": (56, 16),
                "resizes.4.projection.weight": (36, 56),
            },
        ),
        (
            "projection-missing",
            {"resizes.0.projection.weight": (12, 36), "resizes.3.projection.weight": (40, 16)},
        ),
        ("gated", {"resizes.3.gate": (32,)}),  # 16 to 48 were written; before layer 1 nothing beyond 36 was
    ],
)
def test_stored_tensors(resize: Resize, expected: dict[str, tuple[int, ...]]) -> None:
    model = Transformer(shape_of(48, 16, 16, 56), settings(resize))
    stored = {name: tuple(w.shape) for name, w in model.state_dict().items() if name.startswith("resizes")}
    assert stored == expected


@pytest.mark.parametrize("resize", LEARNED)
def test_starts(resize: Resize) -> None:
    shape = shape_of(480, 16, 16, 560, embed_width=360)
    model, carried = Transformer(shape, settings(resize), seed=5), Transformer(shape, settings("carry"), seed=5)
    same = dict(carried.named_parameters())
    for name, weight in model.named_parameters():
        if name.endswith("gate"):
            assert torch.equal(weight, torch.zeros_like(weight))
        elif name.startswith("resizes"):
            bound = weight.shape[1] ** -0.5
            assert 0.95 * bound < weight.abs().max() <= bound
            assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
        elif weight.shape == same[name].shape and resize == "gated":
            assert torch.equal(weight, same[name]), name
    with torch.device("meta"):
        late = Transformer(shape, settings(resize), seed=5)
    late.to_empty(device="cpu")
    initialize(late, seed=5)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, late.state_dict()[name]), name


def test_under_layernorm_a_learned_start_shares_all_other_numbers_with_the_carried_one() -> None:
    shape = shape_of(*SHAPES["x"])
    carried = Transformer(shape, settings("carry", "gpt2")).state_dict()
    for resize in OTHERS:
        other = Transformer(shape, settings(resize, "gpt2")).state_dict()
        assert all(torch.equal(weight, other[name]) for name, weight in carried.items()), resize


@pytest.mark.parametrize("resize", LEARNED)
def test_what_is_learned_gets_a_gradient(resize: Resize) -> None:
    model, tokens = Transformer(shape_of(*SHAPES["to and fro"]), settings(resize)), random_tokens(2, 16)
    torch.autograd.backward(functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
    gradients = {name: p.grad for name, p in model.named_parameters() if name.startswith("resizes")}
    assert gradients
    for name, gradient in gradients.items():
        assert gradient is not None and (gradient != 0).float().mean() > 0.9, name


@others
def test_autocast_keeps_the_stream_in_float32(resize: Resize) -> None:
    model, tokens = Transformer(shape_of(*SHAPES["x"]), settings(resize)), random_tokens(2, 16)
    exact = model.hidden(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.hidden(tokens)
    assert hidden.dtype == torch.float32
    torch.testing.assert_close(hidden, exact, rtol=0, atol=0.1)


@styles
@shapes
def test_a_constant_stream_is_the_carried_one_of_layers_that_wide(shape: str, style: Style) -> None:
    varied, tokens = shape_of(*SHAPES[shape]), random_tokens(2, 16)
    constant = random_model(varied, settings("constant", style))
    straight = Transformer(as_built(varied, constant.config), settings("carry", style)).double()
    straight.load_state_dict(constant.state_dict())
    with torch.no_grad():
        assert torch.equal(constant(tokens), straight(tokens))
    for layer in constant.built_layers:
        assert layer.width == 36
    assert constant.shape == varied


def test_a_constant_stream_starts_by_the_fan_in_of_each_matrix() -> None:
    shape = shape_of(480, 120, 480, embed_width=360)
    for initialisation, scale in (("scaled", 0.02 * math.sqrt(768 / 360)), ("mup", 0.1)):
        config = dataclasses.replace(settings("constant"), initialisation=initialisation)  # type: ignore[arg-type]
        model = Transformer(shape, config)
        for layer, (_, block) in zip(shape.layers, model.blocks(), strict=True):
            assert block.attention is not None and block.mlp is not None
            for weight in (block.attention.qkv.weight, block.mlp.input.weight):
                assert weight.std().item() == pytest.approx(scale, rel=0.03)
            back = scale * math.sqrt(360 / layer.width) / math.sqrt(6)
            for weight in (block.attention.out.weight, block.mlp.output.weight):
                assert weight.std().item() == pytest.approx(back, rel=0.04)


def test_a_bowtie_of_constant_stream_is_matched_by_the_sum_of_widths() -> None:
    config = dataclasses.replace(settings("constant"), vocab_size=100_263, context=4096)
    shape = bowtie(layers=24, width=960, heads=16, config=config)
    widths = [layer.width for layer in shape.layers]
    assert min(widths) == 288 and widths[0] == widths[-1]
    assert abs(sum(widths) - 24 * 960) <= 24 * 16
    reference = bowtie(layers=24, width=960, heads=16, bottleneck=1.0, config=config)
    assert budget(shape, config).ratio_to(budget(reference, config))["kv_cache_bytes_per_token"] == pytest.approx(
        1, abs=0.01
    )


def test_a_constant_stream_has_one_width() -> None:
    with pytest.raises(ShapeError, match=r"^embed_width 36 and unembed_width 20 differ, but a constant stream[^\n]*$"):
        Transformer(shape_of(48, 32, unembed_width=20), settings("constant"))


@pytest.mark.slow
@pytest.mark.parametrize("resize", ["gated", "interpolation"])
def test_it_still_compiles_as_one_graph(resize: Resize) -> None:
    torch._dynamo.reset()
    model, tokens = Transformer(shape_of(*SHAPES["x"]), settings(resize)), random_tokens(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(tokens), model(tokens), rtol=1e-4, atol=1e-5)
