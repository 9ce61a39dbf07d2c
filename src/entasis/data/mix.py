"""Which source of a mixture a sequence comes from: a pure function of the seed and the sequence's number.

Sources are told apart one after the other: of the sequences that no earlier source has taken, a source of share v takes
the m-th exactly if floor(m v + phase) steps up there. Its count after any number of those is therefore less than one
off their share, and of k sources none is ever k sequences off its weight, in the first hundred sequences as after a
billion; drawing at random would be off by the square root of the count. The floors are those of whole numbers, so that
no rounding can move a sequence, however long the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from entasis.data.hashing import hash64

_PHASES = 1 << 32
_KEY = 0x6D6978
"""Keeps these hashes apart from those that order windows and hide tokens."""


class Mix:
    """Shares of several sources, turned into places in one row of sequences."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """Weights above 0 with any sum, taken as the decimal numbers that they are written as; at least one."""
        exact = [Fraction(repr(float(weight))) for weight in weights]
        self.shares = tuple(weight / sum(exact) for weight in exact)
        """Of each source; their sum is 1."""
        phases = hash64(np.arange(len(exact), dtype=np.uint64), _KEY, seed) % np.uint64(_PHASES)
        self._levels = [
            (share.numerator * _PHASES, share.denominator * _PHASES, int(phase) * share.denominator)
            for phase, share in zip(
                phases, (weight / sum(exact[index:]) for index, weight in enumerate(exact)), strict=True
            )
        ]

    def place(self, sequence: int) -> tuple[int, int]:
        """The source of a sequence, and how many sequences the source gave before it."""
        left = sequence
        for source, (share, whole, phase) in enumerate(self._levels):
            before = (left * share + phase) // whole
            if (left * share + share + phase) // whole > before:
                return source, before
            left -= before
        raise AssertionError("the last source takes what is left")

    def counts(self, sequences: int) -> list[int]:
        """How many of the first `sequences` come from each source."""
        left, counts = sequences, []
        for share, whole, phase in self._levels:
            counts.append((left * share + phase) // whole)
            left -= counts[-1]
        return counts
