"""The whole network: what it answers, what it refuses, what it must not see."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from entasis.errors import EntasisError, ShapeError
from entasis.model import attention
from entasis.model.transformer import Transformer
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape

styles = pytest.mark.parametrize("style", ["gpt2", "llama"])
Style = Literal["gpt2", "llama"]


def varied_shape(**ends: int) -> Shape:
    layers = (
        LayerShape(width=48, heads=4, kv_heads=2, head_dim=12, mlp_hidden=96),
        LayerShape(width=32, heads=2, kv_heads=1, head_dim=8, mlp_hidden=64, value_dim=12),
        LayerShape(width=16, heads=0, kv_heads=0, head_dim=0, mlp_hidden=64),
        LayerShape(width=32, heads=2, kv_heads=2, head_dim=16, mlp_hidden=0),
    )
    return Shape(layers, **{"embed_width": 40, **ends})


def small_model(style: Style, **parts: Any) -> Transformer:
    config = ModelConfig.from_dict({"vocab_size": 97, "context": 16, "style": style, **parts})
    return Transformer(varied_shape(), config)


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(97, shape, generator=torch.Generator().manual_seed(1))


@styles
def test_logits_are_the_head_of_the_hidden_state(style: Style) -> None:
    model, tokens = small_model(style), random_tokens(2, 16)
    hidden = model.hidden(tokens)
    assert hidden.shape == (2, 16, 40)
    assert model.head_weight.shape == (97, 40)
    assert torch.equal(model(tokens), functional.linear(hidden, model.head_weight))
    assert (model.head_weight is model.embed.weight) == (style == "gpt2")


@styles
def test_names_of_the_stored_weights(style: Style) -> None:
    kinds = ("weight", "bias") if style == "gpt2" else ("weight",)
    attention = [f"attention.{name}.{kind}" for name in ("norm", "qkv", "out") for kind in kinds]
    mlp = [f"mlp.{name}.{kind}" for name in ("norm", "input", "output") for kind in kinds]
    layers = [attention + mlp, attention + mlp, mlp, attention]
    names = ["embed.weight", *(["positions.weight"] if style == "gpt2" else [])]
    names += [f"layers.{number}.{name}" for number, layer in enumerate(layers) for name in layer]
    names += [f"norm.{kind}" for kind in kinds] + (["head.weight"] if style == "llama" else [])
    assert list(small_model(style).state_dict()) == names


@styles
@pytest.mark.parametrize("documents", [None, torch.tensor([[0] * 6 + [1] * 10])])
def test_a_later_token_never_changes_earlier_logits(style: Style, documents: Tensor | None) -> None:
    model, tokens = small_model(style), random_tokens(1, 16)
    with torch.no_grad():
        before = model(tokens, documents)
        for position in range(1, 16):
            changed = tokens.clone()
            changed[0, position] = (changed[0, position] + 1) % 97
            after = model(changed, documents)
            assert torch.equal(after[:, :position], before[:, :position])
            assert not torch.equal(after[:, position], before[:, position])


@styles
def test_expanded_keys_and_values_equal_grouped_ones(style: Style, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = small_model(style), random_tokens(2, 16)
    with torch.no_grad():
        grouped = model(tokens)
        monkeypatch.setattr(attention, "_groups_in_kernel", lambda *_: False)
        torch.testing.assert_close(model(tokens), grouped, rtol=0, atol=1e-6)


@styles
def test_autocast_keeps_the_stream_in_float32(style: Style) -> None:
    model, tokens = small_model(style), random_tokens(2, 16)
    exact = model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        hidden, logits = model.hidden(tokens), model(tokens)
    assert hidden.dtype == torch.float32
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), exact, rtol=0, atol=0.05)


def test_learned_positions_end_at_the_context_and_rotary_ones_do_not() -> None:
    tokens = random_tokens(1, 17)
    with pytest.raises(EntasisError, match=r"^a sequence of 17 tokens .* 16 learned positions[^\n]*$"):
        small_model("gpt2")(tokens)
    assert small_model("llama")(tokens).shape == (1, 17, 97)


@pytest.mark.parametrize(
    ("layer", "ends", "message"),
    [
        ({"window": 8}, {"causal": False}, "layer 1: window 8"),
        ({"experts": 4, "experts_per_token": 5}, {}, "layer 1: experts_per_token 5 of 4 experts"),
        ({"kv_heads": 3}, {}, "layer 1: 3 key/value heads"),
        ({"head_dim": 7}, {"positions": "rotary"}, "layer 1: head dim 7"),
        ({}, {"tied": True, "unembed_width": 24}, "embed_width 32 and unembed_width 24"),
    ],
)
def test_shapes_with_errors_are_refused(layer: dict[str, int], ends: dict[str, Any], message: str) -> None:
    fields = {"width": 32, "heads": 4, "kv_heads": 4, "head_dim": 8, "mlp_hidden": 64, **layer}
    unembed_width = ends.pop("unembed_width", None)
    config = ModelConfig.from_dict({"vocab_size": 97, "context": 16, **ends})
    with pytest.raises(ShapeError, match=message):
        Transformer(Shape((LayerShape(**fields),), 32, unembed_width), config)


@styles
def test_the_head_may_be_narrower_or_wider_than_everything(style: Style) -> None:
    config = ModelConfig(vocab_size=97, context=16, style=style, tied=False)
    for width in (8, 32, 44, 64):
        model = Transformer(varied_shape(unembed_width=width), config)
        hidden = model.hidden(random_tokens(1, 4))
        assert hidden.shape == (1, 4, width)
        assert torch.equal(hidden[..., 48:], torch.zeros(1, 4, max(0, width - 48)))


@pytest.mark.slow
@pytest.mark.parametrize(("style", "cut"), [("gpt2", 6), ("llama", None)])
def test_the_model_compiles_as_one_graph(style: Style, cut: int | None) -> None:
    torch._dynamo.reset()
    model, tokens = small_model(style), random_tokens(2, 16)
    documents = None if cut is None else (torch.arange(16) >= cut).long().expand(2, 16)
    compiled = torch.compile(model, fullgraph=True)
    results = []
    for network in (model, compiled):
        model.zero_grad()
        logits = network(tokens, documents)
        torch.autograd.backward(functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()))
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
