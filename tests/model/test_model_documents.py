"""Packed documents: neither attention nor positions cross from one into the next."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from entasis.model.documents import document_mask, document_positions
from entasis.model.transformer import Transformer
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape

styles = pytest.mark.parametrize("style", ["gpt2", "llama"])


def small_model(style: Literal["gpt2", "llama"]) -> Transformer:
    layers = tuple(
        LayerShape(width=w, heads=h, kv_heads=max(1, h // 2), head_dim=w // h, mlp_hidden=2 * w)
        for w, h in ((48, 4), (32, 2), (16, 1), (32, 2))
    )
    return Transformer(Shape(layers, embed_width=32), ModelConfig(vocab_size=97, context=16, style=style))


def sharpened(model: Transformer) -> Transformer:
    """The same in float64 with larger weights: attention is far from even, so that the least leak is seen."""
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(97, shape, generator=torch.Generator().manual_seed(1))


@styles
@pytest.mark.parametrize(("sharp", "tolerance"), [(False, 1e-6), (True, 1e-10)])
def test_packed_documents_equal_each_alone(style: Literal["gpt2", "llama"], sharp: bool, tolerance: float) -> None:
    model, tokens = small_model(style), random_tokens(2, 16)
    model = sharpened(model) if sharp else model
    lengths = [(5, 11), (9, 7)]  # another cut in each row
    documents = torch.tensor([[0] * a + [1] * b for a, b in lengths])
    with torch.no_grad():
        packed = model(tokens, documents)
        for row, (cut, _) in enumerate(lengths):
            for piece in (slice(0, cut), slice(cut, 16)):
                alone = model(tokens[row : row + 1, piece])[0]
                torch.testing.assert_close(packed[row, piece], alone, rtol=0, atol=tolerance)


@styles
def test_nothing_leaks_out_of_a_document(style: Literal["gpt2", "llama"]) -> None:
    model, tokens = sharpened(small_model(style)), random_tokens(1, 16)
    other = tokens.clone()
    other[:, :5] = (tokens[:, :5] + 1) % 97
    documents = torch.tensor([[7] * 5 + [8] * 6 + [7] * 5])  # the third is a document of its own in spite of its number
    with torch.no_grad():
        assert torch.equal(model(tokens, documents)[:, 5:], model(other, documents)[:, 5:])
        assert (model(tokens)[:, 5:] - model(other)[:, 5:]).abs().max() > 1e-3


@styles
def test_one_document_equals_none_given(style: Literal["gpt2", "llama"]) -> None:
    model, tokens = small_model(style), random_tokens(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, torch.zeros_like(tokens)), model(tokens), rtol=0, atol=1e-6)


def test_positions_and_mask_come_from_the_same_cuts() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [4, 5, 5, 5, 4, 4]])
    assert document_positions(documents).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 0, 1]]
    mask = document_mask(documents)
    assert mask.shape == (2, 1, 6, 6)
    for row in range(2):
        for query in range(6):
            first = query - int(document_positions(documents)[row, query])
            assert mask[row, 0, query].nonzero().flatten().tolist() == list(range(first, query + 1))
