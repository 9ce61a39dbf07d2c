"""A 64-bit hash of numbers, the same on every machine and with every version of every library."""

from __future__ import annotations

from typing import Any

import numpy as np

Words = np.ndarray[Any, np.dtype[np.uint64]]

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def hash64(values: Words, *keys: int) -> Words:
    """Hash of each value under one or more whole-number keys; all 64 bits are usable. (The mixer is SplitMix64's.)"""
    state = 0
    for key in keys:
        # The same mixing as below, in Python's whole numbers: far faster than numpy for one of them.
        state = ((state ^ (key & _MASK)) + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK
        state ^= state >> 31
    words = (values + np.uint64(1)) * np.uint64(_GOLDEN) ^ np.uint64(state)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_SECOND)
    return words ^ (words >> np.uint64(31))
