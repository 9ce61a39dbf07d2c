"""Which documents are held out: a fixed choice by running number, or the tail where there is only one document."""

from __future__ import annotations

from typing import Any

import numpy as np

from entasis.data.hashing import hash64

SMALLEST_HELD_OUT_BYTES = 8192
"""Held-out text is at least this long, so that a window of 1,024 tokens fits with any usual tokenizer ..."""
LARGEST_SHARE_FOR_IT = 10
"""... but for its sake no more than a tenth of a small text is taken."""
_SEED = 20_240_605
_NEAR_BYTES = 200

Mask = np.ndarray[Any, np.dtype[np.bool_]]


def choose_held_out(document_bytes: np.ndarray[Any, np.dtype[np.int64]], fraction: float) -> Mask:
    """Which of the documents (at least two; sizes in bytes, in their order) are held out.

    Documents are ranked by a hash of their running number with a fixed seed. The first ones are held out: those whose
    hash lies below `fraction`, so that a document keeps its side when others are added at the end; at least one; more
    until they hold min(8 KiB, a tenth of the text); never all.
    """
    numbers = np.arange(len(document_bytes), dtype=np.uint64)
    rank = hash64(numbers, _SEED)
    order = np.argsort(rank, kind="stable")
    below = int(np.count_nonzero(rank < np.uint64(int(fraction * 2**64))))
    held_bytes = np.cumsum(document_bytes[order])
    enough = int(np.searchsorted(held_bytes, smallest_held_out(int(held_bytes[-1])))) + 1
    count = min(max(below, enough, 1), len(document_bytes) - 1)
    held_out = np.zeros(len(document_bytes), np.bool_)
    held_out[order[:count]] = True
    return held_out


def smallest_held_out(text_bytes: int) -> int:
    """Bytes that are held out at least, of a text of `text_bytes`."""
    return min(SMALLEST_HELD_OUT_BYTES, text_bytes // LARGEST_SHARE_FOR_IT)


def cut_tail(text: str, fraction: float) -> tuple[str, str]:
    """A single document as its head and its tail; the two together are the text again.

    The cut lies before a blank if there is one near, so that no word is cut. Texts of a single character, which cannot
    be cut, are their own head, and the tail is empty.
    """
    data = text.encode()
    tail = max(int(fraction * len(data)), smallest_held_out(len(data)), 1)
    cut = len(data) - min(tail, (len(data) + 1) // 2)
    near = max(cut - _NEAR_BYTES, 0)
    blank = max(data.rfind(b" ", near, cut + 1), data.rfind(b"\n", near, cut + 1))
    if blank > 0:
        cut = blank
    while data[cut] & 0xC0 == 0x80:  # inside a character of several bytes
        cut -= 1
    if not cut:  # two long characters: the first is the head
        cut = len(text[0].encode())
    return data[:cut].decode(), data[cut:].decode()
