"""What is hidden from an encoder: a pure function of seed, step and place, of the share that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from entasis.data.dataset import TokenData
from entasis.data.masking import Masking
from entasis.data.stream import IGNORED, Batch, BatchStream, held_out_batches

Prepare = Callable[..., TokenData]

EOS, MASK = 256, 257


def masking(share: float = 0.3) -> Masking:
    return Masking(share, mask_id=MASK, eos_id=EOS)


def stream(data: TokenData, **settings: Any) -> BatchStream:
    options: dict[str, Any] = {"context": 16, "batch_sequences": 8, "seed": 3, "masking": masking()} | settings
    return BatchStream(data.train, eos_id=data.eos_id, **options)


def evaluation(data: TokenData, *, batch_sequences: int = 3, tokens: int = 7 * 16, **settings: Any) -> Batch:
    batches = list(
        held_out_batches(
            data.held_out,
            context=16,
            batch_sequences=batch_sequences,
            tokens=tokens,
            document_mask=False,
            eos_id=data.eos_id,
            **{"masking": masking(), **settings},
        )
    )
    tokens_, targets = ([getattr(batch, name) for batch in batches] for name in ("tokens", "targets"))
    return Batch(np.concatenate(tokens_), np.concatenate(targets), None)


def assert_equal(one: Batch, two: Batch) -> None:
    assert (one.tokens == two.tokens).all()
    assert (one.targets == two.targets).all()


@pytest.mark.parametrize("document_mask", [False, True])
def test_targets_are_the_hidden_tokens_at_their_own_places(prepare: Prepare, document_mask: bool) -> None:
    data = prepare(["abc", "de", "fghijk", "l"] * 60)
    whole = stream(data, masking=None, document_mask=document_mask).batch(4)
    batch = stream(data, document_mask=document_mask).batch(4)
    hidden = batch.targets != IGNORED
    assert batch.counted == hidden.sum() > 0
    assert (batch.tokens[hidden] == MASK).all()
    assert (batch.targets[hidden] == whole.tokens[hidden]).all()
    assert (batch.tokens[~hidden] == whole.tokens[~hidden]).all()
    assert EOS in batch.tokens
    assert EOS not in batch.targets
    assert MASK not in batch.targets
    if document_mask:
        assert batch.documents is not None and whole.documents is not None
        assert (batch.documents == whole.documents).all()


def test_masks_are_a_pure_function_of_seed_and_step(prepare: Prepare) -> None:
    data = prepare()
    used, fresh = stream(data), stream(data)
    for step in (0, 1, 500, 3):
        used.batch(step)
    assert_equal(used.batch(1000), fresh.batch(1000))
    again = stream(data, seed=4)
    assert ((used.batch(0).targets != IGNORED) != (again.batch(0).targets != IGNORED)).any()
    assert ((used.batch(0).targets != IGNORED) != (used.batch(1).targets != IGNORED)).any()


def test_slices_make_the_whole(prepare: Prepare) -> None:
    """A rank that takes a slice of the global batch hides there what the whole batch hides."""
    batches = stream(prepare())
    whole = batches.batch(5)
    for start, stop in ((0, 3), (3, 4), (4, 8)):
        assert_equal(batches.batch(5, start, stop), whole.part(start, stop))


def test_a_window_is_masked_otherwise_in_each_epoch(prepare: Prepare) -> None:
    data = prepare()
    batches = stream(data, batch_sequences=1)
    count = batches.windows_per_epoch
    masks = []
    for epoch in range(3):
        step = next(step for step in range(epoch * count, (epoch + 1) * count) if batches.windows(step) == [5])
        masks.append(batches.batch(step).targets[0] != IGNORED)
    assert len({mask.tobytes() for mask in masks}) == 3


def test_evaluation_masks_depend_on_the_window_alone(prepare: Prepare) -> None:
    data = prepare(held_out=0.3)
    first = evaluation(data)
    assert_equal(first, evaluation(data))
    for batch_sequences in (1, 2, 100):
        assert_equal(first, evaluation(data, batch_sequences=batch_sequences))
    every = data.held_out.windows(16)
    larger = evaluation(data, tokens=10**9)
    for number in range(7):
        assert (first.targets[number] == larger.targets[number * every // 7]).all()


@pytest.mark.parametrize("share", [0.01, 0.15, 0.3, 0.5, 0.99])
@pytest.mark.parametrize("time", [16, 128, 1000])
def test_each_window_hides_the_share(share: float, time: int) -> None:
    tokens = np.arange(40 * time).reshape(40, time) % 200
    hidden = masking(share).hidden(tokens, range(40), 1)
    assert (hidden.sum(axis=1) == max(1, int(share * time + 0.5))).all()


def test_every_place_is_hidden_as_often_as_every_other() -> None:
    tokens = np.zeros((4000, 16), np.int64)
    hidden = masking(0.25).hidden(tokens, range(4000), 7)
    counts = hidden.sum(axis=0)
    assert ((counts - 1000) ** 2 / 750).sum() < 45  # about chi-square of 15 degrees: p < 1e-4 above
    pairs = (hidden[:, :-1] & hidden[:, 1:]).sum(axis=0) / 4000
    assert np.abs(pairs - 0.25 * 3 / 15).max() < 0.02, "neighbours are hidden independently, but for the fixed number"
    assert abs(np.corrcoef(hidden[:-1].ravel(), hidden[1:].ravel())[0, 1]) < 0.02


def test_end_tokens_are_never_hidden_and_one_other_always_is() -> None:
    tokens = np.full((6, 16), EOS)
    tokens[1, 3] = 7
    tokens[2, :] = 7
    tokens[3, ::2] = 7
    hidden = masking(0.3).hidden(tokens, range(6), 1)
    assert not hidden[tokens == EOS].any()
    assert hidden.sum(axis=1).tolist() == [0, 1, 5, 2, 0, 0]
    assert hidden[1, 3]


def test_masks_never_change() -> None:
    # Runs are continued with later versions: these places are part of the format.
    tokens = np.zeros((3, 20), np.int64)
    places = [np.flatnonzero(row).tolist() for row in masking(0.25).hidden(tokens, [0, 1, 10**12], 5)]
    assert places == PINNED
    assert np.flatnonzero(masking(0.25).hidden(tokens[:1], [0])).tolist() == PINNED_HELD_OUT


PINNED = [[7, 10, 13, 14, 16], [1, 3, 8, 12, 16], [0, 1, 11, 16, 19]]
PINNED_HELD_OUT = [4, 8, 11, 14, 18]
