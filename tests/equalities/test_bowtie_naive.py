"""The ><former forward pass with its published multipliers, written a second time as the paper describes it.

There is no stream here: every state is kept in a list, and before each layer its input is put together anew. Plain
numpy in float64, one token's vector at a time where that is clearer; nothing of the package but the weights' names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from entasis.model.transformer import Transformer
from entasis.shape.families import bowtie, design
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import Shape

Array = npt.NDArray[np.float64]

EMBEDDING_MULTIPLIER = 12.0
RESIDUAL_MULTIPLIER = 0.22
WIDTH_MULTIPLIER = 8.0
EPSILON = 1e-5
THETA = 10_000.0
WIDTH, HEADS = 64, 4


@dataclass
class Layer:
    """Full-width weights of one layer, (out, in)."""

    attention_gain: Array
    query: Array
    key: Array
    value: Array
    attention_out: Array
    mlp_gain: Array
    gate: Array
    up: Array
    down: Array

    @property
    def width(self) -> int:
        return len(self.attention_gain)


@dataclass
class Network:
    embedding: Array
    layers: list[Layer]
    final_gain: Array
    head: Array


def rms_norm(x: Array, gain: Array) -> Array:
    return np.stack([gain * row / np.sqrt(row @ row / len(row) + EPSILON) for row in x])


def shrink(state: Array, width: int) -> Array:
    """The first coordinates are kept."""
    return state[:, :width]


def move_up(states: list[Array], width: int) -> Array:
    """Each missing coordinate comes from the newest earlier state that is wide enough; the embedding is the oldest."""
    columns = [states[-1][:, c] for c in range(states[-1].shape[1])]
    while len(columns) < width:
        column = np.zeros(len(states[0]))
        for state in states[::-1]:
            if state.shape[1] > len(columns):
                column = state[:, len(columns)]
                break
        columns.append(column)
    return np.stack(columns, axis=1)


def resize(states: list[Array], width: int) -> Array:
    return shrink(states[-1], width) if states[-1].shape[1] >= width else move_up(states, width)


def rope(x: Array) -> Array:
    """Position t turns (first half, second half) by t / theta^(2 i / d)."""
    half = x.shape[1] // 2
    turned = np.empty_like(x)
    for t, row in enumerate(x):
        for i in range(half):
            angle = t * THETA ** (-2 * i / x.shape[1])
            turned[t, i] = row[i] * np.cos(angle) - row[half + i] * np.sin(angle)
            turned[t, half + i] = row[i] * np.sin(angle) + row[half + i] * np.cos(angle)
    return turned


def attention(layer: Layer, x: Array) -> Array:
    dim = layer.width // HEADS
    normed = rms_norm(x, layer.attention_gain)
    q, k, v = normed @ layer.query.T, normed @ layer.key.T, normed @ layer.value.T
    mixed = np.zeros((len(x), layer.width))
    for head in range(HEADS):
        mine = slice(head * dim, head * dim + dim)
        scores = rope(q[:, mine]) @ rope(k[:, mine]).T / dim
        for t in range(len(x)):
            weights = np.exp(scores[t, : t + 1] - scores[t, : t + 1].max())
            mixed[t, mine] = weights @ v[: t + 1, mine] / weights.sum()
    return mixed @ layer.attention_out.T


def swiglu(layer: Layer, x: Array) -> Array:
    normed = rms_norm(x, layer.mlp_gain)
    gate = normed @ layer.gate.T
    return np.asarray((gate / (1 + np.exp(-gate)) * (normed @ layer.up.T)) @ layer.down.T)


def logits(network: Network, tokens: list[int], *, cut_before_norm: bool = False) -> Array:
    width = network.embedding.shape[1]
    states = [network.embedding[tokens] * EMBEDDING_MULTIPLIER]
    for layer in network.layers:
        x = resize(states, layer.width)
        x = x + RESIDUAL_MULTIPLIER * attention(layer, x)
        x = x + RESIDUAL_MULTIPLIER * swiglu(layer, x)
        states.append(x)
    if cut_before_norm:
        return rms_norm(resize(states, width), network.final_gain[:width]) @ network.head.T / WIDTH_MULTIPLIER
    normed = rms_norm(states[-1], network.final_gain)
    return np.asarray(resize([*states[:-1], normed], width) @ network.head.T / WIDTH_MULTIPLIER)


def taken_from(model: Transformer) -> Network:
    """The model's weights; query, key and value inputs that it does not store are made up, since they meet zeros."""
    stored = {name: weight.numpy() for name, weight in model.state_dict().items()}
    layers = []
    for number, width in enumerate(layer.width for layer in model.shape.layers):
        of = {name.split(".", 2)[2]: w for name, w in stored.items() if name.startswith(f"layers.{number}.")}
        qkv = np.full((3 * width, width), 7.0)
        qkv[:, : of["attention.qkv.weight"].shape[1]] = of["attention.qkv.weight"]
        query, key, value = np.split(qkv, 3)
        gate, up = np.split(of["mlp.input.weight"], 2)
        layers.append(
            Layer(
                of["attention.norm.weight"],
                query,
                key,
                value,
                of["attention.out.weight"],
                of["mlp.norm.weight"],
                gate,
                up,
                of["mlp.output.weight"],
            )
        )
    return Network(stored["embed.weight"], layers, stored["norm.weight"], stored["head.weight"])


def settings() -> ModelConfig:
    return ModelConfig(
        vocab_size=97, context=10, style="llama", attention_scale="linear", initialisation="mup",
        embedding_multiplier=EMBEDDING_MULTIPLIER, residual_multiplier=RESIDUAL_MULTIPLIER,
        logit_divisor=WIDTH_MULTIPLIER,
    )  # fmt: skip


def family(name: str, **own: Any) -> Shape:
    config = settings()
    return design(name, {"layers": 6, "width": WIDTH, "heads": HEADS, "multiple": 8, **own}, config).shape


def perturbed(shape: Shape) -> Transformer:
    """In float64, with norm weights that are not one and updates large enough that every term counts."""
    model = Transformer(shape, settings(), seed=3).double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.3)
    return model


SHAPES: dict[str, Callable[[], Shape]] = {
    "x": lambda: bowtie(layers=6, width=WIDTH, heads=HEADS, bottleneck=0.3, turn=4, multiple=8, config=settings()),
    "permuted x": lambda: family("bowtie", permute=1, turn=4),
    "diamond": lambda: family("diamond", turn=3),
    "growing": lambda: family("growing"),
    "narrowing": lambda: family("narrowing"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_model_equals_the_paper(name: str) -> None:
    model = perturbed(SHAPES[name]())
    network = taken_from(model)
    tokens = torch.randint(97, (2, 10), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        answers = model(tokens).numpy()
    expected = np.stack([logits(network, row) for row in tokens.tolist()])
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(answers, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("name", "wider_than_the_head"), [("x", True), ("growing", True), ("narrowing", False)])
def test_the_final_norm_before_the_cut_is_not_the_norm_after_it(name: str, wider_than_the_head: bool) -> None:
    shape = SHAPES[name]()
    assert (shape.layers[-1].width > WIDTH) == wider_than_the_head
    network, tokens = taken_from(perturbed(shape)), list(range(10))
    if wider_than_the_head:
        assert np.abs(logits(network, tokens) - logits(network, tokens, cut_before_norm=True)).max() > 1e-2
    else:  # the missing coordinates come un-normalised from an earlier state
        assert network.final_gain.shape[0] < WIDTH


def test_the_shapes_are_what_they_are_called() -> None:
    widths = {name: [layer.width for layer in make().layers] for name, make in SHAPES.items()}
    x, diamond, growing, narrowing = (widths[name] for name in ("x", "diamond", "growing", "narrowing"))
    assert x[0] == x[-1] > WIDTH > min(x) == x[3]
    assert sorted(widths["permuted x"]) == sorted(x) and widths["permuted x"] != x
    assert diamond[0] == diamond[-1] < WIDTH < max(diamond) == diamond[2]
    assert growing == sorted(growing) and narrowing == sorted(narrowing, reverse=True)
    assert growing[0] < WIDTH < growing[-1] and narrowing[-1] < WIDTH < narrowing[0]
