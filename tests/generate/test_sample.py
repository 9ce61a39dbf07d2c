"""Continuing a prompt: reproducible, within the context, to the end of the document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from entasis.data.tokenizers import BPE_EOS, ByteTokenizer, Tokenizer, train_bpe
from entasis.errors import ConfigError
from entasis.generate.sample import generate_text
from entasis.model.moe import Routing
from entasis.model.transformer import Transformer
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape

_BYTES = ByteTokenizer()
_CONTEXT = 8


def _model(style: str, vocab_size: int = 257) -> Transformer:
    layers = (
        LayerShape(width=32, heads=2, kv_heads=1, head_dim=8, mlp_hidden=32),
        LayerShape(width=16, heads=1, kv_heads=1, head_dim=16, mlp_hidden=16),
    )
    config = ModelConfig.from_dict({"vocab_size": vocab_size, "context": _CONTEXT, "style": style})
    model = Transformer(Shape(layers, 24), config, seed=3)
    with torch.no_grad():  # far from uniform, so that draws differ from the likeliest and depend on the text
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> Transformer:
    return _model(request.param)


class Scripted(Transformer):
    """A model that says given tokens in turn, and notes what it was shown."""

    def __init__(self, script: Sequence[int]) -> None:
        layer = LayerShape(width=257, heads=1, kv_heads=1, head_dim=2, mlp_hidden=0)
        super().__init__(Shape((layer,), 257), ModelConfig(vocab_size=257, context=_CONTEXT))
        with torch.no_grad():
            self.head_weight.copy_(torch.eye(257))
        self.script, self.shown = list(script), []

    shown: list[list[int]]

    def hidden(self, tokens: Tensor, documents: Tensor | None = None, routings: list[Routing] | None = None) -> Tensor:
        self.shown.append(tokens[0].tolist())
        state = torch.zeros(*tokens.shape, 257)
        state[0, -1, self.script[len(self.shown) - 1]] = 9.0
        return state


def test_the_same_seed_gives_the_same_text(model: Transformer) -> None:
    settings: dict[str, Any] = {"tokens": 30, "temperature": 1.0}
    first = generate_text(model, _BYTES, "The", seed=1, **settings)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert generate_text(model, _BYTES, "The", seed=1, **settings) == first
    assert torch.equal(torch.get_rng_state(), before), "draws have a generator of their own"
    assert generate_text(model, _BYTES, "The", seed=2, **settings) != first
    assert first.startswith("The")


def test_temperature_zero_is_the_likeliest_token(model: Transformer) -> None:
    text = generate_text(model, _BYTES, "In", tokens=6, temperature=0, seed=1)
    assert generate_text(model, _BYTES, "In", tokens=6, temperature=0, seed=2) == text
    ids = [256, *b"In"]
    for _ in range(6):
        with torch.no_grad():
            chosen = int(model(torch.tensor([ids[-_CONTEXT:]]))[0, -1].argmax())
        if chosen == 256:
            break
        ids.append(chosen)
    assert _BYTES.decode(ids[1:]) == text
    assert generate_text(model, _BYTES, "In", tokens=6, temperature=1, top_k=1) == text


@pytest.mark.parametrize("temperature", [1e-3, 1e-12, 1e-40, 5e-324])
def test_any_small_temperature_is_close_to_zero(temperature: float, model: Transformer) -> None:
    cold = generate_text(model, _BYTES, "In", tokens=6, temperature=temperature)
    assert cold == generate_text(model, _BYTES, "In", tokens=6, temperature=0)


@pytest.mark.parametrize("temperature", [100.0, 1e30, 1.7e308])
def test_any_high_temperature_draws(temperature: float, model: Transformer) -> None:
    assert len(generate_text(model, _BYTES, "In", tokens=6, temperature=temperature).encode()) >= 2


@pytest.mark.parametrize("length", [_CONTEXT - 2, _CONTEXT - 1, _CONTEXT, _CONTEXT + 1, 5 * _CONTEXT])
def test_a_prompt_may_be_longer_than_the_context(length: int, model: Transformer) -> None:
    prompt = ("abcdefghij" * length)[:length]
    text = generate_text(model, _BYTES, prompt, tokens=4, temperature=0)
    assert text.startswith(prompt)
    if length >= _CONTEXT:
        other = "zzz" + prompt[length - _CONTEXT :]
        continued = generate_text(model, _BYTES, other, tokens=4, temperature=0)
        assert continued.removeprefix(other) == text.removeprefix(prompt), "the last `context` tokens decide"


def test_what_the_model_is_shown() -> None:
    """The document's beginning first, then at most the last `context` tokens."""
    model = Scripted(b"xyzuvw")
    assert generate_text(model, _BYTES, "abcdef", tokens=4, temperature=0) == "abcdefxyzu"
    assert model.shown == [
        [256, *b"abcdef"],
        [256, *b"abcdefx"],
        list(b"abcdefxy"),
        list(b"bcdefxyz"),
    ]


def test_an_empty_prompt_begins_a_document() -> None:
    model = Scripted(b"hi!")
    assert generate_text(model, _BYTES, "", tokens=3, temperature=0) == "hi!"
    assert model.shown[0] == [256]


def test_ends_with_the_document() -> None:
    model = Scripted([*b"so", 256, *b"more"])
    assert generate_text(model, _BYTES, "And ", tokens=7, temperature=0) == "And so"
    assert len(model.shown) == 3


def test_no_tokens_is_the_prompt(model: Transformer) -> None:
    assert generate_text(model, _BYTES, "as it is", tokens=0) == "as it is"


@pytest.mark.parametrize("top_k", [1, 3, 256, 257, 1000, None])
def test_only_the_likeliest_are_drawn_from(top_k: int | None) -> None:
    model = _model("llama")
    ids = [256, *b"a"]
    with torch.no_grad():
        logits = model(torch.tensor([ids]))[0, -1]
    allowed = set(logits.topk(min(top_k or 257, 257)).indices.tolist())
    drawn = set()
    for seed in range(60):
        text = generate_text(model, _BYTES, "a", tokens=1, temperature=50.0, top_k=top_k, seed=seed)
        drawn.add(text)
    assert len(drawn) <= (top_k or 257)
    if top_k == 3:
        assert drawn == {_BYTES.decode([*b"a", each]) if each != 256 else "a" for each in allowed}
    if top_k is None:
        assert len(drawn) > 3


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(["the sea and the land and the wind"] * 4, 280)


def test_written_control_tokens_are_ordinary_text(bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("llama", bpe.vocab_size)
    shown: list[list[int]] = []
    original = Transformer.hidden

    def hidden(self: Transformer, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        shown.append(tokens[0].tolist())
        return original(self, tokens, documents)

    monkeypatch.setattr(Transformer, "hidden", hidden)
    text = generate_text(model, bpe, BPE_EOS, tokens=1, temperature=0)
    assert text.startswith(BPE_EOS)
    assert bpe.eos_id not in bpe.encode_batch([BPE_EOS])[0]
    assert shown[0] == [bpe.eos_id, *bpe.encode_batch([BPE_EOS])[0]][-_CONTEXT:]


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ({"tokens": -1}, "tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -3}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 10**30}, "seed"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_named(setting: dict[str, Any], names: str, model: Transformer) -> None:
    with pytest.raises(ConfigError, match=f"^{names}: expected "):
        generate_text(model, _BYTES, "a", **setting)


def test_leaves_the_model_as_it_was(model: Transformer) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generate_text(model, _BYTES, "The", tokens=3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
