"""The published ><former recipe's multipliers, attention scale and initialisation; and that the defaults do nothing."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from entasis.model.loss import summed_cross_entropy
from entasis.model.transformer import Transformer
from entasis.shape.budget import budget
from entasis.shape.model_config import ModelConfig, Style
from entasis.shape.records import LayerShape, Shape

styles = pytest.mark.parametrize("style", get_args(Style))
RECIPE: dict[str, Any] = {
    "attention_scale": "linear",
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logit_divisor": 8.0,
    "initialisation": "mup",
}


def small_shape() -> Shape:
    layers = tuple(
        LayerShape(width=w, heads=h, kv_heads=h, head_dim=w // h, mlp_hidden=2 * w)
        for w, h in ((48, 4), (32, 2), (16, 1), (40, 2))
    )
    return Shape(layers, embed_width=32)


def settings(style: Style = "llama", **parts: Any) -> ModelConfig:
    return ModelConfig(vocab_size=97, context=16, style=style, **parts)


def random_model(config: ModelConfig, shape: Shape | None = None) -> Transformer:
    model = Transformer(shape or small_shape(), config).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.2)
    return model


def with_weights_of(model: Transformer, config: ModelConfig) -> Transformer:
    other = Transformer(model.shape, config).double()
    other.load_state_dict(model.state_dict())
    return other


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(97, shape, generator=torch.Generator().manual_seed(1))


@styles
def test_each_multiplier_equals_scaled_weights(style: Style) -> None:
    tokens = random_tokens(2, 16)
    plain = random_model(settings(style, tied=False))

    def answer(config: ModelConfig, scales: dict[str, float]) -> tuple[Tensor, Tensor]:
        scaled = with_weights_of(plain, settings(style, tied=False))
        with torch.no_grad():
            for name, parameter in scaled.named_parameters():
                parameter.mul_(math.prod(by for part, by in scales.items() if part in name))
            return with_weights_of(plain, config)(tokens), scaled(tokens)

    cases: list[tuple[dict[str, Any], dict[str, float]]] = [
        ({"embedding_multiplier": 12.0}, {"embed.": 12.0, "positions.": 12.0}),
        ({"residual_multiplier": 0.22}, {".out.": 0.22, ".output.": 0.22}),
        ({"logit_divisor": 8.0}, {"head.": 1 / 8}),
    ]
    for parts, scales in cases:
        mine, other = answer(settings(style, tied=False, **parts), scales)
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)
        assert (mine - plain(tokens)).abs().max() > 1e-3


@styles
def test_the_attention_scale_is_that_of_each_layers_own_head_dim(style: Style) -> None:
    plain = random_model(settings(style))
    linear = with_weights_of(plain, settings(style, attention_scale="linear"))
    with torch.no_grad():
        for layer, block in plain.blocks():
            assert block.attention is not None
            queries = layer.heads * layer.head_dim
            block.attention.qkv.weight[:queries] /= math.sqrt(layer.head_dim)
            if block.attention.qkv.bias is not None:
                block.attention.qkv.bias[:queries] /= math.sqrt(layer.head_dim)
        tokens = random_tokens(2, 16)
        torch.testing.assert_close(linear(tokens), plain(tokens), rtol=0, atol=1e-10)


@styles
def test_the_loss_divides_the_logits_once(style: Style) -> None:
    model, tokens = random_model(settings(style, **RECIPE)), random_tokens(2, 16)
    logits = model(tokens)
    assert torch.equal(logits, functional.linear(model.hidden(tokens), model.head_weight))
    undivided = with_weights_of(model, settings(style, **{**RECIPE, "logit_divisor": 1.0}))(tokens)
    torch.testing.assert_close(logits, undivided / 8, rtol=0, atol=1e-10)
    targets = tokens.flatten()
    loss = summed_cross_entropy(model.hidden(tokens).flatten(0, 1), model.head_weight, targets)
    expected = functional.cross_entropy((undivided / 8).flatten(0, 1), targets, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)


class _Operations(TorchFunctionMode):
    """Names of all operations, with the factors of scaled sums."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.alphas: list[float] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        self.alphas.append((kwargs or {}).get("alpha", 1))
        return func(*args, **(kwargs or {}))


def test_at_the_defaults_no_multiplication_is_executed() -> None:
    # Uniform, without rotary positions and gates, which multiply: nothing else of the forward pass does.
    layer = LayerShape(width=32, heads=4, kv_heads=4, head_dim=8, mlp_hidden=64)
    shape, tokens = Shape((layer, layer), embed_width=32), random_tokens(1, 16)
    multiplied = {"mul", "mul_", "__mul__", "__rmul__", "div", "__truediv__"}
    for parts, expected in (({}, False), ({"embedding_multiplier": 12.0}, True), ({"logit_divisor": 8.0}, True)):
        with torch.no_grad(), _Operations() as operations:
            Transformer(shape, settings("gpt2", **parts)).hidden(tokens)
        assert bool(multiplied & set(operations.names)) == expected
        assert set(operations.alphas) == {1}


@styles
def test_a_multiplier_of_one_is_the_plain_sum(style: Style) -> None:
    model, tokens = Transformer(small_shape(), settings(style)), random_tokens(2, 16)
    [(layer, block), *_] = model.blocks()
    assert block.attention is not None and block.mlp is not None
    x = torch.randn(2, 16, layer.width, generator=torch.Generator().manual_seed(3))
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            rotation = model._rotations(torch.arange(16)[None]).get(layer.head_dim)
            middle = x + block.attention(x, rotation, None)
            assert torch.equal(block(x, rotation, None)[0], middle + block.mlp(middle))
    assert model(tokens).shape == (2, 16, 97)


@styles
def test_the_published_initialisation(style: Style) -> None:
    layers = tuple(
        LayerShape(width=w, heads=4, kv_heads=2, head_dim=32, mlp_hidden=4 * w, value_dim=24) for w in (320, 128, 192)
    )
    shape = Shape(layers, embed_width=256)
    model = Transformer(shape, dataclasses.replace(settings(style, **RECIPE), context=64))
    expected = {"embed.weight": 0.1, "positions.weight": 0.1, "head.weight": 0.1}
    for number, width in enumerate((320, 128, 192)):
        into = 0.1 / math.sqrt(8) * math.sqrt(256 / width)
        for name in ("attention.qkv", "mlp.input"):
            expected[f"layers.{number}.{name}.weight"] = into
        for name in ("attention.out", "mlp.output"):  # not adjusted for the fan-in of 4 w
            expected[f"layers.{number}.{name}.weight"] = into / math.sqrt(2 * 3)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            assert parameter.std().item() == pytest.approx(expected[name], rel=0.03), name
            assert abs(parameter.mean().item()) < 0.05 * expected[name], name
        else:
            start = 1.0 if name.endswith("norm.weight") else 0.0
            assert torch.equal(parameter, torch.full_like(parameter, start)), name


def test_both_initialisations_draw_the_same_numbers_at_their_own_scales() -> None:
    scaled, mup = Transformer(small_shape(), settings()), Transformer(small_shape(), settings(**RECIPE))
    for name, weight in scaled.named_parameters():
        other = mup.get_parameter(name)
        torch.testing.assert_close(weight / weight.norm(), other / other.norm())


def test_multipliers_cost_nothing() -> None:
    assert budget(small_shape(), settings(**RECIPE)) == budget(small_shape(), settings())
