"""One side of the split: a long row of tokens in several files, and where its documents start."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from entasis.data.flat import Array, FlatFile
from entasis.errors import ConfigError, EntasisError

Int64Array = np.ndarray[Any, np.dtype[np.int64]]


class DocumentStarts(Protocol):
    """Where documents start, in positions of the whole row of files."""

    def between(self, start: int, stop: int) -> Int64Array:
        """Positions p with start <= p < stop at which a document starts, ascending."""


class RecordedStarts:
    """Starts from a file that lists them, ascending."""

    def __init__(self, file: FlatFile) -> None:
        self.file = file

    def between(self, start: int, stop: int) -> Int64Array:
        """As `DocumentStarts`."""
        low = self.file.count_below(start)
        # A document has at least one token, so there are no more starts than positions.
        candidates = self.file.read(low, min(low + stop - start, self.file.length))
        return candidates[: int(np.searchsorted(candidates, stop))].astype(np.int64)


class TokenSplit:
    """A row of tokens, or a stretch of one, read by position."""

    def __init__(
        self,
        folder: Path,
        name: str,
        files: Sequence[FlatFile],
        vocab_size: int,
        *,
        starts: DocumentStarts | None,
        first: int = 0,
        tokens: int | None = None,
        starts_follow_end: bool = True,
    ) -> None:
        """Describe the row; nothing is read.

        Args:
            folder: what messages name.
            name: `train` or `held-out`.
            files: at least one; the row is their tokens one after the other.
            vocab_size: largest allowed id + 1.
            starts: where documents start; None: it is not known.
            first: the split begins at this token of the row.
            tokens: how many it has; None: all to the end of the row.
            starts_follow_end: whether a document's start has an end token before it, where there are end tokens.
        """
        self.folder = folder
        self.name = name
        self.files = tuple(files)
        self._starts = [0, *accumulate(file.length for file in files)]
        self._first = first
        self.tokens = self._starts[-1] - first if tokens is None else tokens
        self.starts_follow_end = starts_follow_end
        self._document_starts = starts
        self._vocab_size = vocab_size

    def windows(self, context: int) -> int:
        """How many windows of `context` tokens and their targets there are: (tokens - 1) // context."""
        return max(self.tokens - 1, 0) // context

    def require_window(self, context: int) -> int:
        """`windows`, which must not be 0.

        Raises:
            ConfigError: the split is shorter than one window.
        """
        if not self.windows(context):
            raise ConfigError(
                f"model.context: {context} is too long for {self.folder}: its {self.name} split has {self.tokens} "
                f"tokens, a window takes {context + 1}; choose a shorter context, or prepare more text"
                + (" or a larger --held-out" if self.name == "held-out" else "")
            )
        return self.windows(context)

    def window(self, index: int, context: int) -> Int64Array:
        """Window `index`: its `context` tokens and one more, as int64 (context + 1,).

        Raises:
            EntasisError: an id lies outside the vocabulary, or a file ends early; the line names file and offset.
            IndexError: there is no such window.
        """
        if not 0 <= index < self.windows(context):
            raise IndexError(f"window {index} of {self.windows(context)}")
        return self.read(index * context, index * context + context + 1)

    def window_starts(self, index: int, context: int) -> Int64Array:
        """Places in window `index`, from 1 to `context`, at which a document starts, ascending."""
        first = index * context
        return self.document_starts(first + 1, first + context + 1) - first

    def window_place(self, index: int, context: int, place: int = 0) -> str:
        """File and offset of a token of a window, for messages."""
        return self.where(index * context + place)

    def read(self, start: int, stop: int) -> Int64Array:
        """The tokens [start, stop) as int64, wherever the borders of files lie.

        Raises:
            EntasisError: as in `window`.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.tokens}")
        out = np.empty(stop - start, np.int64)
        position, last = start + self._first, stop + self._first
        shard = bisect_right(self._starts, position) - 1
        while position < last:
            first = self._starts[shard]
            end = min(last, self._starts[shard + 1])
            values = self.files[shard].read(position - first, end - first)
            require_in_range(self.files[shard], position - first, values, self._vocab_size)
            out[position - self._first - start : end - self._first - start] = values
            position = end
            shard += 1
        return out

    def document_starts(self, start: int, stop: int) -> Int64Array:
        """Positions p with start <= p < stop at which a document starts, ascending.

        Raises:
            ConfigError: nothing says where documents start.
        """
        if self._document_starts is None:
            raise ConfigError(
                f"data.document_mask: {self.folder} does not say where documents start; set data.eos_id, or "
                "data.document_mask=false"
            )
        return self._document_starts.between(start + self._first, stop + self._first) - self._first

    def where(self, position: int) -> str:
        """File and offset of a token, for messages."""
        position += self._first
        shard = bisect_right(self._starts, position, hi=len(self.files)) - 1
        return f"{self.files[shard].path} at token {position - self._starts[shard]}"


def require_in_range(file: FlatFile, position: int, values: Array, vocab_size: int) -> None:
    """Checks values that stand at `position` of a file.

    Raises:
        EntasisError: one lies outside the vocabulary; the line names file and offset.
    """
    wrong = first_out_of_range(values, vocab_size)
    if wrong is not None:
        raise EntasisError(out_of_range(file.path, position + wrong, int(values[wrong]), vocab_size))


def first_out_of_range(values: Array, vocab_size: int) -> int | None:
    """Place of the first value that is no id of the vocabulary."""
    if not values.size or (int(values.max()) < vocab_size and int(values.min()) >= 0):
        return None
    return int(np.argmax((values >= vocab_size) | (values < 0)))


def out_of_range(path: Path, position: int, value: int, vocab_size: int) -> str:
    """The line for such a value."""
    return (
        f"{path}: token {position} is {value}, outside the vocabulary of {vocab_size}; the file is damaged or was made "
        "with another tokenizer"
    )
