"""Batches as a pure function of (seed, step): any step is reached at once, and nothing has to be remembered.

Every window of the split is seen once per epoch, in an order of its own in each epoch. The order comes from a shuffle
that tells where one position goes without making the others (`shuffled`), so neither time nor memory grows with the
data, and it is the same on every machine and with every version of numpy. Ranks and micro-batches take slices of the
global batch, whose contents do not depend on how it is sliced.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from entasis.data.hashing import hash64
from entasis.data.masking import Masking
from entasis.data.mix import Mix
from entasis.data.mixture import MixedSplit
from entasis.data.token_split import Int64Array, TokenSplit
from entasis.errors import EntasisError

IGNORED = -100
"""Target of a position that is not counted."""
_SHUFFLE_ROUNDS = 96
_BLOCK = 2048  # positions whose places are worked out together, since a round costs about the same for one


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one step, or a slice of them."""

    tokens: Int64Array
    """(batch, time)"""
    targets: Int64Array
    """(batch, time): the next token; -100 where the next token belongs to another document and documents are masked.
    Under a `Masking`: the token that is hidden at this place; -100 where none is."""
    documents: Int64Array | None
    """(batch, time): number of the document within the window, from 0; None unless documents are masked."""

    @property
    def counted(self) -> int:
        """Targets that count."""
        return int(np.count_nonzero(self.targets != IGNORED))

    def part(self, start: int, stop: int) -> Batch:
        """Sequences [start, stop) of these."""
        documents = None if self.documents is None else self.documents[start:stop]
        return Batch(self.tokens[start:stop], self.targets[start:stop], documents)


class BatchStream:
    """The training batches of a split."""

    def __init__(
        self,
        split: TokenSplit | MixedSplit,
        *,
        context: int,
        batch_sequences: int,
        seed: int,
        eos_id: int | None,
        document_mask: bool = False,
        masking: Masking | None = None,
    ) -> None:
        """Set up the stream; nothing is read yet.

        Args:
            split: the tokens.
            context: tokens per window.
            batch_sequences: windows of the global batch of one step.
            seed: drives the order of windows and what is hidden in them, and nothing else.
            eos_id: the id that closes documents; what the recorded starts of documents are checked against. None: no
                id does.
            document_mask: whether batches isolate documents from each other.
            masking: what is hidden and to be predicted, anew in each epoch; None: the next token is predicted.

        Raises:
            ConfigError: the split is shorter than one window.
        """
        self.split = split
        self.context = context
        self.batch_sequences = batch_sequences
        self.seed = seed
        self.windows_per_epoch = split.require_window(context)
        """Windows of all sources; each source of a mixture has epochs of its own."""
        parts, weights = (split.parts, split.weights) if isinstance(split, MixedSplit) else ((split,), (1.0,))
        self._mix = Mix(weights, seed)
        self._sizes = [part.windows(context) for part in parts]
        self._firsts = split.first_windows(context) if isinstance(split, MixedSplit) else [0]
        self._cutter = _WindowCutter(split, context, eos_id, document_mask)
        self._masking = masking
        self._order_block = functools.lru_cache(maxsize=8 * len(parts))(self._make_order_block)

    def batch(self, step: int, start: int = 0, stop: int | None = None) -> Batch:
        """Sequences [start, stop) of the global batch of `step` (both counted from 0).

        Raises:
            EntasisError: the data is damaged; the line names file and offset.
        """
        stop = self.batch_sequences if stop is None else stop
        if step < 0 or not 0 <= start < stop <= self.batch_sequences:
            raise IndexError(f"sequences [{start}, {stop}) of {self.batch_sequences} at step {step}")
        batch = self._cutter.cut(self.windows(step)[start:stop])
        first = step * self.batch_sequences
        return _masked(batch, self._masking, range(first + start, first + stop), self.seed)

    def windows(self, step: int) -> list[int]:
        """Which windows of the split make the global batch of `step`, in order."""
        first = step * self.batch_sequences
        return [self._window_at(sequence) for sequence in range(first, first + self.batch_sequences)]

    def sequences(self, step: int) -> list[int]:
        """Sequences consumed at the start of `step`, of each source."""
        return self._mix.counts(step * self.batch_sequences)

    def epochs(self, step: int) -> list[float]:
        """Epochs consumed at the start of `step`, of each source."""
        return [count / size for count, size in zip(self.sequences(step), self._sizes, strict=True)]

    def describe(self, step: int) -> str:
        """One line that says where the batch of `step` lies in the data."""
        windows = self.windows(step)
        shown = ", ".join(map(str, windows[:8])) + (", …" if len(windows) > 8 else "")
        where = self.split.window_place(windows[0], self.context)
        epochs = " and ".join(f"{epoch:.3f}" for epoch in self.epochs(step))
        return f"epoch {epochs}, windows {shown} of {self.context} tokens (the first: {where})"

    def _window_at(self, sequence: int) -> int:
        source, number = self._mix.place(sequence)
        epoch, position = divmod(number, self._sizes[source])
        return self._firsts[source] + int(self._order_block(source, epoch, position // _BLOCK)[position % _BLOCK])

    def _make_order_block(self, source: int, epoch: int, block: int) -> Int64Array:
        size = self._sizes[source]
        positions = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, size))
        seed = self.seed if source == 0 else int(hash64(np.array([source], np.uint64), self.seed)[0])
        return shuffled(positions, size, seed, epoch)


def held_out_batches(
    split: TokenSplit | MixedSplit,
    *,
    context: int,
    batch_sequences: int,
    tokens: int,
    document_mask: bool,
    eos_id: int | None,
    masking: Masking | None = None,
) -> Iterator[Batch]:
    """About `tokens` tokens of a split in evenly spaced windows: at least one window, and the same ones every time.

    The last batch may be smaller than `batch_sequences`. What `masking` hides in a window depends on the window alone.

    Raises:
        ConfigError: the split is shorter than one window (at once, not at the first batch).
    """
    available = split.require_window(context)
    count = min(max(tokens // context, 1), available)
    windows = [number * available // count for number in range(count)]
    cutter = _WindowCutter(split, context, eos_id, document_mask)
    groups = (windows[first : first + batch_sequences] for first in range(0, count, batch_sequences))
    return (_masked(cutter.cut(group), masking, group) for group in groups)


@dataclass(frozen=True, slots=True)
class _WindowCutter:
    """Reads windows and puts them together to a batch."""

    split: TokenSplit | MixedSplit
    context: int
    eos_id: int | None
    document_mask: bool

    def cut(self, windows: list[int]) -> Batch:
        rows = np.stack([self.split.window(window, self.context) for window in windows])
        tokens, targets = rows[:, :-1].copy(), rows[:, 1:].copy()
        if not self.document_mask:
            return Batch(tokens, targets, None)
        # Recorded starts, not the closing id: an id can stand where no document ends in data that others made, and
        # attention, positions and targets must all follow one source.
        starts_document = np.zeros(rows.shape, np.int64)
        for row, window in enumerate(windows):
            starts = self.split.window_starts(window, self.context)
            if self.eos_id is not None and self.split.starts_follow_end:
                self._require_ends(rows[row], starts, window)
            starts_document[row, starts] = 1
        documents = np.cumsum(starts_document, axis=1)
        targets[starts_document[:, 1:] == 1] = IGNORED
        return Batch(tokens, targets, documents[:, :-1].copy())

    def _require_ends(self, row: Int64Array, starts: Int64Array, window: int) -> None:
        open_ended = starts[row[starts - 1] != self.eos_id]
        if open_ended.size:
            raise EntasisError(
                f"{self.split.window_place(window, self.context, int(open_ended[0]))}: a document is said to start "
                "here, but none ends before it; prepare the data again"
            )


def _masked(batch: Batch, masking: Masking | None, sequences: Sequence[int], *keys: int) -> Batch:
    if masking is None:
        return batch
    hidden = masking.hidden(batch.tokens, sequences, *keys)
    tokens = np.where(hidden, masking.mask_id, batch.tokens)
    return Batch(tokens, np.where(hidden, batch.tokens, IGNORED), batch.documents)


def shuffled(positions: Int64Array, size: int, seed: int, epoch: int) -> Int64Array:
    """Where a shuffle of `size` things puts the given positions, each in [0, size); without making the whole shuffle.

    The swap-or-not shuffle (Hoang, Morris and Rogaway 2012): each round pairs every position x with (key - x) mod size,
    and swaps a pair if a hashed bit of the pair says so. A round is its own inverse, so the whole is a permutation for
    any size; with this many rounds it cannot be told from a random one.
    """
    order = positions.astype(np.uint64)
    count = np.uint64(size)
    keys = hash64(np.arange(_SHUFFLE_ROUNDS, dtype=np.uint64), seed, epoch) % count
    for number, key in enumerate(keys):
        partner = (key + (count - order)) % count
        swap = hash64(np.maximum(order, partner), seed, epoch, number) >> np.uint64(63)
        order = np.where(swap == 1, partner, order)
    return order.astype(np.int64)
