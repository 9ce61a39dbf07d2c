"""Which tokens an encoder has to predict: a pure function of the data's tokens, a seed and a sequence's number.

Every hidden token is replaced by the mask id, so that nothing but its neighbours speaks of it: the loss is that of
filling gaps, and no part of it that of copying. How many are hidden is a share of the window; which ones, a hash says.
So neither micro-batches nor ranks, resuming or evaluating change them, and there is no random state to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from entasis.data.hashing import hash64

BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
_KEY = 0x6D61736B
"""Keeps these hashes apart from those that order the windows."""
_NEVER = np.uint64(2**64 - 1)


@dataclass(frozen=True, slots=True)
class Masking:
    """What is hidden from an encoder, and by what."""

    share: float
    """Of a window's tokens, the end tokens of documents not counted; above 0 and below 1."""
    mask_id: int
    """Stands in place of a hidden token; outside the data's vocabulary."""
    eos_id: int | None
    """Never hidden: where documents end is how the text was cut, and not part of it."""

    def hidden(self, tokens: np.ndarray[Any, np.dtype[np.int64]], sequences: Sequence[int], *keys: int) -> BoolArray:
        """Which tokens are hidden: in each window the same share, rounded, and at least one if there is any.

        Args:
            tokens: (batch, time).
            sequences: a number for each window, on which its mask depends.
            keys: on which all masks depend.
        """
        candidates = np.full(tokens.shape, True) if self.eos_id is None else tokens != self.eos_id
        time = tokens.shape[1]
        numbers = np.asarray(sequences, np.uint64)[:, None] * np.uint64(time) + np.arange(time, dtype=np.uint64)
        draws = np.where(candidates, hash64(numbers, _KEY, *keys), _NEVER)
        wanted = np.floor(self.share * candidates.sum(axis=1, keepdims=True) + 0.5).astype(np.int64)
        largest = np.take_along_axis(np.sort(draws, axis=1), np.maximum(wanted, 1) - 1, axis=1)
        hidden: BoolArray = candidates & (draws <= largest)
        return hidden
