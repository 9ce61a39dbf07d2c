"""Megatron's pairs of files: `.bin` holds tokens, `.idx` says where sequences lie in it and which make a document.

The index: the letters MMIDIDX and two zero bytes; version 1 (uint64); a code for the tokens' type (one byte); the
number of sequences and of document entries (uint64 each); then the length of each sequence in tokens (int32), its
byte in `.bin` (int64), and the number of the sequence with which each document begins (int64), closed by the number of
sequences. (An index for several modalities goes on with a byte per sequence.) All little-endian.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np

from entasis.data.flat import FlatFile
from entasis.data.token_split import Int64Array
from entasis.errors import EntasisError

MAGIC: Final = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES: Final = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""By the code in the index. (6 and 7 are floating point, which is no token.)"""


def data_file(path: str) -> str:
    """The `.bin` of a path that is given with it, with `.idx`, or without ending."""
    return path if path.endswith(".bin") else path.removesuffix(".idx") + ".bin"


def index_file(path: Path) -> Path:
    """The index of a `.bin`."""
    return path.with_suffix(".idx")


@dataclass(frozen=True, slots=True)
class MegatronIndex:
    """An index whose header fits its length."""

    path: Path
    dtype: str
    lengths: FlatFile
    """Of each sequence, in tokens."""
    pointers: FlatFile
    """Of each sequence, in bytes of `.bin`."""
    documents: FlatFile
    """Number of the first sequence of each document, and the number of sequences."""

    def tokens_of(self, path: Path) -> FlatFile:
        """The tokens of the `.bin`, which must end where the last sequence does.

        Raises:
            EntasisError: it is longer or shorter.
        """
        itemsize = np.dtype(self.dtype).itemsize
        last = self.lengths.length - 1
        end = int(self.pointers.read(last, last + 1)[0]) + itemsize * int(self.lengths.read(last, last + 1)[0])
        size = path.stat().st_size
        if size != end or end % itemsize or not end:
            raise EntasisError(
                f"{path}: {size} bytes long, but by {self.path.name} its last sequence ends at byte {end}; it was cut, "
                "or belongs to another index"
            )
        return FlatFile(path, self.dtype, 0, end // itemsize)


def open_index(path: Path) -> MegatronIndex:
    """Reads the header.

    Raises:
        EntasisError: missing, of another format, empty or cut.
    """
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
        size = path.stat().st_size
    except OSError as error:
        raise EntasisError(f"{path}: cannot be read ({error.strerror}); a .bin needs its .idx beside it") from error
    if len(header) < _HEADER.size:
        raise EntasisError(f"{path}: {size} bytes are too few for Megatron's index; it was cut")
    magic, version, code, sequences, documents = _HEADER.unpack(header)
    if magic != MAGIC or version != 1:
        raise EntasisError(f"{path}: begins with {magic!r}, version {version}, instead of {MAGIC!r}, version 1")
    if code not in TOKEN_TYPES:
        raise EntasisError(f"{path}: type {code} is none of tokens ({', '.join(map(str, TOKEN_TYPES))})")
    lengths = FlatFile(path, "<i4", _HEADER.size, sequences)
    pointers = FlatFile(path, "<i8", lengths.byte(sequences), sequences)
    starts = FlatFile(path, "<i8", pointers.byte(sequences), documents)
    end = starts.byte(documents)
    if size not in {end, end + sequences} or sequences < 1 or documents < 2:
        raise EntasisError(
            f"{path}: {size} bytes long, but its header promises {sequences} sequences and {documents} document "
            f"entries, which end at byte {end}; it was cut or damaged"
        )
    return MegatronIndex(path, TOKEN_TYPES[code], lengths, pointers, starts)


class MegatronStarts:
    """Where documents start, in tokens of several pairs one after the other."""

    def __init__(self, pairs: Sequence[tuple[MegatronIndex, FlatFile]]) -> None:
        self._indices = [index for index, _ in pairs]
        self._firsts = [0, *accumulate(file.length for _, file in pairs)]

    def between(self, start: int, stop: int) -> Int64Array:
        """As `DocumentStarts`."""
        found = [np.empty(0, np.int64)]
        pair = bisect_right(self._firsts, start) - 1
        while pair < len(self._indices) and self._firsts[pair] < stop:
            first = self._firsts[pair]
            end = min(stop, self._firsts[pair + 1])
            found.append(first + _starts(self._indices[pair], max(start, first) - first, end - first))
            pair += 1
        return np.concatenate(found)


def _starts(index: MegatronIndex, start: int, stop: int) -> Int64Array:
    itemsize = np.dtype(index.dtype).itemsize
    # Sequences that begin in the stretch, then documents that begin with one of them. Empty sequences and documents
    # share their place with the next one.
    low, high = (index.pointers.count_below(place * itemsize) for place in (start, stop))
    if low == high:
        return np.empty(0, np.int64)
    pointers = index.pointers.read(low, high)
    first, last = (index.documents.count_below(sequence) for sequence in (low, high))
    sequences = index.documents.read(first, last)
    return np.unique(pointers[sequences - low]) // itemsize
