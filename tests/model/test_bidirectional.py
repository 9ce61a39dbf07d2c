"""Encoders: every token attends to the whole window or document, and to nothing else."""

from __future__ import annotations

from typing import cast, get_args

import pytest
import torch
from torch import Tensor

from entasis.data.tokenizers import Tokenizer
from entasis.errors import ConfigError, ShapeError
from entasis.generate.sample import generate_text
from entasis.model.documents import document_mask
from entasis.model.transformer import Transformer
from entasis.shape.model_config import ModelConfig, Positions, Style
from entasis.shape.records import LayerShape, Shape

styles = pytest.mark.parametrize("style", get_args(Style))
LENGTH = 12


def encoder(style: Style = "llama", *, causal: bool = False, positions: Positions | None = None) -> Transformer:
    """In float64, with weights large enough that attention is far from even."""
    layers = tuple(
        LayerShape(width=w, heads=h, kv_heads=max(1, h // 2), head_dim=w // h, mlp_hidden=2 * w)
        for w, h in ((48, 4), (32, 2), (16, 1), (32, 2))
    )
    config = ModelConfig.from_dict(
        {"vocab_size": 97, "context": LENGTH, "style": style, "positions": positions, "causal": causal}
    )
    model = Transformer(Shape(layers, embed_width=32), config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(97, shape, generator=torch.Generator().manual_seed(1))


@styles
def test_every_token_changes_every_logit(style: Style) -> None:
    model, tokens = encoder(style), random_tokens(1, LENGTH)
    with torch.no_grad():
        before = model(tokens)
        for position in range(LENGTH):
            changed = tokens.clone()
            changed[0, position] = (changed[0, position] + 1) % 97
            assert ((model(changed) - before).abs().amax(dim=-1) > 1e-6).all()


@styles
def test_attention_over_the_whole_window_written_out(style: Style) -> None:
    model = encoder(style)
    [(layer, block), *_] = model.blocks()
    attention = block.attention
    assert attention is not None
    x = torch.randn(2, LENGTH, layer.width, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x[..., 32:] = 0
    queries, keys, values = attention.qkv(attention.norm(x)[..., : attention.qkv.in_width]).split([48, 24, 24], dim=-1)
    mixed = []
    for head in range(4):
        q = queries[..., head * 12 : head * 12 + 12]
        k, v = (part[..., head // 2 * 12 : head // 2 * 12 + 12] for part in (keys, values))
        mixed.append(torch.softmax(q @ k.transpose(1, 2) / 12**0.5, dim=-1) @ v)
    with torch.no_grad():
        torch.testing.assert_close(attention(x), attention.out(torch.cat(mixed, dim=-1)), rtol=0, atol=1e-10)


@styles
def test_documents_stay_apart(style: Style) -> None:
    model, tokens = encoder(style), random_tokens(2, LENGTH)
    cuts = (5, 8)
    documents = torch.tensor([[0] * cut + [1] * (LENGTH - cut) for cut in cuts])
    with torch.no_grad():
        packed = model(tokens, documents)
        for row, cut in enumerate(cuts):
            for piece in (slice(0, cut), slice(cut, LENGTH)):
                alone = model(tokens[row : row + 1, piece])[0]
                torch.testing.assert_close(packed[row, piece], alone, rtol=0, atol=1e-10)


def test_the_mask_is_symmetric_and_stays_inside_documents() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, 0]])
    mask = document_mask(documents, causal=False)
    number = torch.tensor([0, 0, 1, 1, 1, 2])
    assert torch.equal(mask[0, 0], number[:, None] == number[None, :])
    assert torch.equal(document_mask(documents), torch.tril(mask))


@styles
def test_one_document_equals_none_given(style: Style) -> None:
    model, tokens = encoder(style), random_tokens(2, LENGTH)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, torch.zeros_like(tokens)), model(tokens), rtol=0, atol=1e-10)


def test_turned_round_with_its_positions_a_sequence_gives_the_same_states_turned_round() -> None:
    model, tokens = encoder("gpt2"), random_tokens(1, LENGTH)
    assert model.positions is not None
    with torch.no_grad():
        forward = model(tokens)
        model.positions.weight.copy_(model.positions.weight.flip(0))
        torch.testing.assert_close(model(tokens.flip(1)).flip(1), forward, rtol=0, atol=1e-10)


@styles
def test_the_same_weights_are_stored_and_the_last_token_sees_the_same_first_layer(style: Style) -> None:
    free, causal = encoder(style), encoder(style, causal=True)
    assert all(torch.equal(weight, causal.state_dict()[name]) for name, weight in free.state_dict().items())
    tokens = random_tokens(1, LENGTH)
    with torch.no_grad():
        assert (free(tokens) - causal(tokens)).abs().max() > 1e-3
        assert torch.equal(free(tokens[:, :1]), causal(tokens[:, :1]))


def test_an_encoder_generates_nothing() -> None:
    with pytest.raises(ConfigError, match=r"^causal: false: [^\n]*$"):
        generate_text(encoder(), cast(Tokenizer, None), "")


def test_windows_and_encoders_do_not_go_together() -> None:
    layer = LayerShape(width=32, heads=4, kv_heads=4, head_dim=8, mlp_hidden=64, window=8)
    with pytest.raises(ShapeError, match=r"^layer 1: window 8[^\n]*causal[^\n]*$"):
        Transformer(Shape((layer,), 32), encoder().config)
