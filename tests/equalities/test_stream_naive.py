"""The fixed stream equals a naive implementation that keeps every earlier state, written here from scratch in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from entasis.model.transformer import Transformer
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape

Array = npt.NDArray[np.float64]
Weights = dict[str, Array]
Models = st.SearchStrategy[tuple[Shape, ModelConfig]]


def naive_logits(weights: Weights, shape: Shape, config: ModelConfig, tokens: list[int]) -> Array:
    time = len(tokens)
    embedding = weights["embed.weight"][tokens]
    if config.positions == "learned":
        embedding = embedding + weights["positions.weight"][:time]
    states = [embedding]
    for number, layer in enumerate(shape.layers):
        state = np.stack([newest(states, coordinate) for coordinate in range(layer.width)], axis=1)
        if layer.heads:
            mine = part(weights, f"layers.{number}.attention.")
            state = state + attention(mine, layer, config, state)
        if layer.mlp_hidden:
            mine = part(weights, f"layers.{number}.mlp.")
            state = state + mlp(mine, layer, config, state)
        states.append(state)
    final = norm(part(weights, "norm."), config, states[-1])
    last = shape.layers[-1].width
    width = shape.embed_width if shape.unembed_width is None else shape.unembed_width
    head_input = np.stack([final[:, c] if c < last else newest(states, c) for c in range(width)], axis=1)
    return head_input @ weights["embed.weight" if config.tied else "head.weight"].T


def newest(states: list[Array], coordinate: int) -> Array:
    """The coordinate in the newest state that is wide enough to hold it; zeros if none is."""
    for state in reversed(states):
        if coordinate < state.shape[1]:
            return state[:, coordinate]
    return np.zeros(len(states[0]))


def part(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def norm(weights: Weights, config: ModelConfig, x: Array) -> Array:
    centred = x - x.mean(axis=1, keepdims=True) if config.norm == "layernorm" else x
    scaled = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + config.norm_epsilon)
    bias = weights["bias"] if config.norm == "layernorm" and config.bias else 0.0
    return np.asarray(scaled * weights["weight"] + bias)


def linear(weights: Weights, name: str, x: Array, config: ModelConfig) -> Array:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if config.bias else y


def attention(weights: Weights, layer: LayerShape, config: ModelConfig, x: Array) -> Array:
    dim, value_dim = layer.head_dim, layer.value_dim or layer.head_dim
    stored = weights["qkv.weight"]
    full = np.zeros((stored.shape[0], layer.width))
    full[:, : stored.shape[1]] = stored
    qkv = linear({**weights, "qkv.weight": full}, "qkv", norm(part(weights, "norm."), config, x), config)
    keys_at, values_at = layer.heads * dim, (layer.heads + layer.kv_heads) * dim
    outputs = []
    for head in range(layer.heads):
        group = head // (layer.heads // layer.kv_heads)
        q = turned(qkv[:, head * dim : (head + 1) * dim], config)
        k = turned(qkv[:, keys_at + group * dim : keys_at + (group + 1) * dim], config)
        v = qkv[:, values_at + group * value_dim : values_at + (group + 1) * value_dim]
        rows = []
        for query in range(len(x)):
            scores = np.array([q[query] @ k[key] / np.sqrt(dim) for key in range(query + 1)])
            chances = np.exp(scores) / np.exp(scores).sum()
            rows.append(sum(chance * v[key] for key, chance in enumerate(chances)))
        outputs.append(np.stack(rows))
    return linear(weights, "out", np.concatenate(outputs, axis=1), config)


def turned(x: Array, config: ModelConfig) -> Array:
    if config.positions != "rotary":
        return x
    half = x.shape[1] // 2
    pairs = x[:, :half] + 1j * x[:, half:]
    for position in range(len(x)):
        for pair in range(half):
            pairs[position, pair] *= np.exp(1j * position * config.rotary_theta ** (-2 * pair / x.shape[1]))
    return np.concatenate([pairs.real, pairs.imag], axis=1)


def mlp(weights: Weights, layer: LayerShape, config: ModelConfig, x: Array) -> Array:
    h = linear(weights, "input", norm(part(weights, "norm."), config, x), config)
    if config.activation == "swiglu":
        gate, up = h[:, : layer.mlp_hidden], h[:, layer.mlp_hidden :]
        h = gate / (1 + np.exp(-gate)) * up
    else:
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    return linear(weights, "output", h, config)


def assert_equal_to_naive(shape: Shape, config: ModelConfig) -> None:
    model = Transformer(shape, config).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # biases that are not zero, norm weights that are not one
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.2)
        tokens = torch.randint(config.vocab_size, (2, config.context), generator=generator)
        logits = model(tokens).numpy()
    weights = {name: weight.numpy() for name, weight in model.state_dict().items()}
    naive = np.stack([naive_logits(weights, shape, config, row) for row in tokens.tolist()])
    assert np.abs(naive).max() > 1e-3
    np.testing.assert_allclose(logits, naive, rtol=0, atol=1e-10)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape_equals_the_naive_stream(data: st.DataObject, random_models: Models) -> None:
    assert_equal_to_naive(*data.draw(random_models))


WIDTHS = (48, 32, 16, 40, 24, 56, 16, 32)


@pytest.mark.parametrize("style", ["gpt2", "llama"])
@pytest.mark.parametrize("embed_width", [8, 36, 64])
@pytest.mark.parametrize("unembed_width", [12, 36, 44, 72])
def test_narrowing_and_widening_again_and_again(style: Any, embed_width: int, unembed_width: int) -> None:
    layers = tuple(
        LayerShape(width=w, heads=h, kv_heads=max(1, h // 2), head_dim=w // 8 * 2, mlp_hidden=2 * w)
        for w, h in zip(WIDTHS, (4, 2, 1, 2, 4, 2, 1, 4), strict=True)
    )
    shape = Shape(layers, embed_width, unembed_width)
    assert_equal_to_naive(shape, ModelConfig(vocab_size=97, context=8, style=style, tied=False))
