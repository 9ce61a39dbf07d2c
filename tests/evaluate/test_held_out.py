"""Held-out loss: the mean over counted tokens, from the same windows each time, without touching random state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from entasis.data.dataset import TokenData
from entasis.data.stream import Batch, held_out_batches
from entasis.evaluate.held_out import bits_per_byte, held_out_loss
from entasis.model.device import choose_computation
from entasis.model.transformer import Transformer
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape

_CPU = choose_computation("cpu", "fp32")


@pytest.fixture(scope="module")
def model() -> Transformer:
    layer = LayerShape(width=16, heads=2, kv_heads=2, head_dim=8, mlp_hidden=16)
    return Transformer(Shape((layer,), 16), ModelConfig(vocab_size=257, context=16), seed=2)


def _batches(data: TokenData, batch_sequences: int, document_mask: bool) -> Iterator[Batch]:
    return held_out_batches(
        data.held_out,
        context=16,
        batch_sequences=batch_sequences,
        tokens=6 * 16,
        document_mask=document_mask,
        eos_id=data.eos_id,
    )


@pytest.mark.parametrize("document_mask", [False, True])
def test_is_the_mean_over_counted_tokens_however_it_is_cut(
    document_mask: bool, model: Transformer, small_data: Path
) -> None:
    data = TokenData.open(small_data)
    total, counted, counts = 0.0, 0, set()
    for batch in _batches(data, 1, document_mask):
        documents = None if batch.documents is None else torch.from_numpy(batch.documents)
        logits = model(torch.from_numpy(batch.tokens), documents)[0].double()
        targets = torch.from_numpy(batch.targets)[0]
        total += functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum").item()
        counted += int((targets != -100).sum())
        counts.add(int((targets != -100).sum()))
    if document_mask:
        assert len(counts) > 1, "windows of different counts: a mean of means would differ"
    for batch_sequences in (1, 2, 4, 5, 100):
        loss = held_out_loss(model, _batches(data, batch_sequences, document_mask), _CPU)
        assert loss == pytest.approx(total / counted, rel=1e-6)


def test_reads_and_changes_no_random_state_and_leaves_no_gradients(model: Transformer, small_data: Path) -> None:
    data = TokenData.open(small_data)
    torch.manual_seed(3)
    np.random.seed(3)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    first = held_out_loss(model, _batches(data, 2, False), _CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.random.get_state()[1].tolist() == numpy_before  # type: ignore[index]
    torch.manual_seed(4)
    assert held_out_loss(model, _batches(data, 2, False), _CPU) == first
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


def test_bits_per_byte() -> None:
    assert bits_per_byte(math.log(2), 1) == pytest.approx(1)
    assert bits_per_byte(4 * math.log(2), 2) == pytest.approx(2)
    assert bits_per_byte(3.0, 3.5) == pytest.approx(3.0 / 0.6931471805599453 / 3.5)
