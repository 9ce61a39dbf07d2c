"""Mixtures: shares from the first sequences on, each source in its own order, and what sources must share."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entasis.data.dataset import TokenData
from entasis.data.mix import Mix
from entasis.data.mixed import mix_sources, source_progress
from entasis.data.stream import BatchStream
from entasis.errors import ConfigError

Prepare = Callable[..., TokenData]
WEIGHTS = st.lists(st.floats(0.001, 1000), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, seed=st.integers(0, 2**63 - 1), start=st.integers(0, 10**12))
def test_places_count_up_source_by_source_from_any_sequence_on(weights: list[float], seed: int, start: int) -> None:
    mix = Mix(weights, seed)
    assert mix.counts(0) == [0] * len(weights)
    counts = mix.counts(start)
    for sequence in range(start, start + 60):
        source, number = mix.place(sequence)
        assert number == counts[source]
        counts[source] += 1
        assert mix.counts(sequence + 1) == counts
        assert sum(counts) == sequence + 1


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, seed=st.integers(0, 2**63 - 1), sequences=st.integers(0, 10**15))
def test_no_source_is_off_its_weight_by_as_many_sequences_as_there_are_sources(
    weights: list[float], seed: int, sequences: int
) -> None:
    exact = [Fraction(repr(weight)) for weight in weights]
    for count, weight in zip(Mix(weights, seed).counts(sequences), exact, strict=True):
        assert abs(count - sequences * weight / sum(exact)) < len(weights)


def test_a_single_source_is_as_without_a_mixture() -> None:
    mix = Mix([0.3], seed=5)
    assert [mix.place(sequence) for sequence in range(50)] == [(0, sequence) for sequence in range(50)]


def test_seeds_shift_the_order_of_sources() -> None:
    orders = {tuple(Mix([7, 3], seed).place(sequence)[0] for sequence in range(10)) for seed in range(20)}
    assert len(orders) > 5
    assert all(sum(order) in {2, 3, 4} for order in orders)


def _mixed(prepare: Prepare) -> tuple[TokenData, TokenData, BatchStream]:
    first, second = prepare(), prepare([f"another text {number}" * 3 for number in range(40)], out="second")
    data = mix_sources([first, second], [0.7, 0.3])
    return first, second, BatchStream(data.train, context=16, batch_sequences=10, seed=3, eos_id=data.eos_id)


def test_each_source_keeps_its_own_order_and_epochs(prepare: Prepare) -> None:
    first, second, stream = _mixed(prepare)
    sizes = [first.train.windows(16), second.train.windows(16)]
    steps = 40 * sum(sizes) // 10
    seen: list[list[int]] = [[], []]
    for window in (window for step in range(steps) for window in stream.windows(step)):
        source = int(window >= sizes[0])
        seen[source].append(window - source * sizes[0])
    assert stream.sequences(steps) == [len(windows) for windows in seen]
    assert stream.epochs(steps) == [len(windows) / size for windows, size in zip(seen, sizes, strict=True)]
    for windows, size in zip(seen, sizes, strict=True):
        bounds = range(0, len(windows) + 1, size)
        epochs = [windows[a:b] for a, b in pairwise(bounds)]
        assert len(epochs) > 3
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs), "each window once an epoch"
        assert epochs[0] != epochs[1]
    alone = BatchStream(first.train, context=16, batch_sequences=1, seed=3, eos_id=256)
    assert seen[0][:50] == [alone.windows(step)[0] for step in range(50)], "the first source, as if it were alone"


def test_batches_hold_the_windows_of_their_sources(prepare: Prepare) -> None:
    first, second, stream = _mixed(prepare)
    offset = first.train.windows(16)
    for step in (0, 7, 1000):
        batch = stream.batch(step)
        for row, window in enumerate(stream.windows(step)):
            split, own = (first.train, window) if window < offset else (second.train, window - offset)
            assert batch.tokens[row].tolist() == split.window(own, 16)[:-1].tolist()
        assert (stream.batch(step, 4, 7).tokens == batch.tokens[4:7]).all()
    assert "data.npy" not in stream.describe(3) and "epoch" in stream.describe(3)


def test_progress_is_told_by_source(prepare: Prepare) -> None:
    first, second, _ = _mixed(prepare)
    data = mix_sources([first, second], [0.7, 0.3])
    stream = BatchStream(data.train, context=16, batch_sequences=10, seed=3, eos_id=data.eos_id)
    progress = source_progress(stream, data, 100)
    assert set(progress["source_tokens"]) == {"data.txt", "second.txt"}
    assert progress["source_tokens"]["data.txt"] == pytest.approx(700 * 16, abs=2 * 16)
    assert sum(progress["source_tokens"].values()) == 1000 * 16
    assert source_progress(BatchStream(first.train, context=16, batch_sequences=4, seed=0, eos_id=256), first, 9) == {}


def test_the_fingerprint_follows_sources_and_shares(prepare: Prepare) -> None:
    first, second, _ = _mixed(prepare)
    same = [mix_sources([first, second], weights).fingerprint for weights in ([0.7, 0.3], [7, 3], [70.0, 30.0])]
    assert len(set(same)) == 1
    others = {mix_sources([first, second], [0.6, 0.4]).fingerprint, mix_sources([second, first], [7, 3]).fingerprint}
    assert len(others | set(same)) == 3


def test_bytes_per_token_are_those_of_mixed_text(prepare: Prepare) -> None:
    first, second, _ = _mixed(prepare)
    data = mix_sources([first, second], [0.7, 0.3])
    assert first.bytes_per_token and second.bytes_per_token
    assert data.bytes_per_token == pytest.approx(0.7 * first.bytes_per_token + 0.3 * second.bytes_per_token)
    assert data.tokenizer() is not None


def test_sources_of_other_tokenizers_are_refused(prepare: Prepare) -> None:
    first, other = prepare(), prepare(out="other", tokenizer="bpe:257")
    with pytest.raises(ConfigError, match=r"data\.mixture\.1: .*other has .*, and .*data has .*one tokenizer"):
        mix_sources([first, other], [1, 1])
