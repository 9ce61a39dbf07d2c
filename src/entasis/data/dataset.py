"""A prepared folder, opened for reading: cheap checks on opening, every check on demand, windows by position."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from entasis.data.manifest import TOKENIZER_FOLDER, Manifest, SplitRecord, read_manifest
from entasis.data.npy import Array, NpyFile, file_sha256
from entasis.data.shards import DISK_DTYPE, DOCUMENTS_DTYPE
from entasis.errors import ConfigError, EntasisError

if TYPE_CHECKING:
    from entasis.data.tokenizers import Tokenizer

Int64Array = np.ndarray[Any, np.dtype[np.int64]]


class TokenSplit:
    """One side of the split: a long row of tokens in several files, and where its documents start."""

    def __init__(self, folder: Path, record: SplitRecord, manifest: Manifest, name: str) -> None:
        """Open every file of the split and check that it is as long as the manifest says.

        Raises:
            EntasisError: a file is missing, of another type or length, or no .npy file.
        """
        self.folder = folder
        self.name = name
        """`train` or `held-out`."""
        self.tokens = record.tokens
        self.bytes = record.bytes
        """UTF-8 bytes of the text behind the tokens."""
        self.documents = record.documents.count
        self.record = record
        self._vocab_size = manifest.vocab_size
        dtype = DISK_DTYPE[manifest.dtype]
        self._shards = [NpyFile(folder / shard.file, dtype, shard.tokens) for shard in record.shards]
        self._starts = [0, *accumulate(shard.tokens for shard in record.shards)]
        self._documents = NpyFile(folder / record.documents.file, DOCUMENTS_DTYPE, record.documents.count)

    def windows(self, context: int) -> int:
        """How many windows of `context` tokens and their targets there are: (tokens - 1) // context."""
        return (self.tokens - 1) // context

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

    def read(self, start: int, stop: int) -> Int64Array:
        """The tokens [start, stop) as int64, wherever the borders of files lie.

        Raises:
            EntasisError: as in `window`.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.tokens}")
        out = np.empty(stop - start, np.int64)
        shard = bisect_right(self._starts, start) - 1
        position = start
        while position < stop:
            first = self._starts[shard]
            end = min(stop, self._starts[shard + 1])
            values = self._shards[shard].read(position - first, end - first)
            self._check_range(self._shards[shard], position - first, values)
            out[position - start : end - start] = values
            position = end
            shard += 1
        return out

    def document_starts(self, start: int, stop: int) -> Int64Array:
        """Positions p with start <= p < stop at which a document starts, ascending."""
        low = self._documents.count_below(start)
        # A document has at least one token, so there are no more starts than positions.
        candidates = self._documents.read(low, min(low + stop - start, self._documents.length))
        return candidates[: int(np.searchsorted(candidates, stop))].astype(np.int64)

    def where(self, position: int) -> str:
        """File and offset of a token, for messages."""
        shard = bisect_right(self._starts, position, hi=len(self._shards)) - 1
        return f"{self._shards[shard].path} at token {position - self._starts[shard]}"

    def verify(self, on_bytes: Callable[[int], None]) -> None:
        """Read everything; see `TokenData.verify`."""
        content = hashlib.sha256()
        for file, shard in zip(self._shards, self.record.shards, strict=True):
            for position, values in file.chunks():
                self._check_range(file, position, values)
                content.update(values.tobytes())
                on_bytes(values.nbytes)
            _check_sha256(file.path, shard.sha256)
        if content.hexdigest() != self.record.content:
            raise EntasisError(f"{self.folder}: {self.name}: shards are not in the order that the manifest describes")
        last = -1
        for position, starts in self._documents.chunks():
            steps = np.diff(starts, prepend=last)
            if (steps <= 0).any() or starts[-1] >= self.tokens or (position == 0 and starts[0] != 0):
                raise EntasisError(
                    f"{self._documents.path}: starts of documents do not ascend from 0 to below {self.tokens}"
                )
            last = int(starts[-1])
            on_bytes(starts.nbytes)
        _check_sha256(self._documents.path, self.record.documents.sha256)

    def _check_range(self, file: NpyFile, position: int, values: Array) -> None:
        if values.size and int(values.max()) >= self._vocab_size:
            wrong = int(np.argmax(values >= self._vocab_size))
            raise EntasisError(
                f"{file.path}: token {position + wrong} is {values[wrong]}, outside the vocabulary of "
                f"{self._vocab_size}; the file is damaged or was made with another tokenizer"
            )


@dataclass(frozen=True, slots=True)
class TokenData:
    """A folder made by `entasis prepare`."""

    path: Path
    manifest: Manifest
    train: TokenSplit
    held_out: TokenSplit

    @classmethod
    def open(cls, path: str | Path) -> TokenData:
        """Open a folder: the manifest is checked, every file has its type and length. No token is read.

        Raises:
            EntasisError: something is missing or does not fit; the line names the file.
        """
        path = Path(path)
        manifest = read_manifest(path)
        return cls(
            path,
            manifest,
            TokenSplit(path, manifest.train, manifest, "train"),
            TokenSplit(path, manifest.held_out, manifest, "held-out"),
        )

    @property
    def name(self) -> str:
        """What the text is, in a word or a few."""
        return self.manifest.name

    @property
    def vocab_size(self) -> int:
        """Largest possible id + 1."""
        return self.manifest.vocab_size

    @property
    def eos_id(self) -> int:
        """Id that closes every document."""
        return self.manifest.eos_id

    @property
    def fingerprint(self) -> str:
        """The same for two folders exactly if tokens, documents, split and tokenizer are the same."""
        return self.manifest.fingerprint

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer that made the tokens.

        Raises:
            EntasisError: it is missing, damaged, or another one.
        """
        from entasis.data.tokenizers import load_tokenizer

        tokenizer = load_tokenizer(self.path / TOKENIZER_FOLDER)
        if tokenizer.fingerprint != self.manifest.tokenizer.fingerprint:
            raise EntasisError(f"{self.path / TOKENIZER_FOLDER}: not the tokenizer that made these tokens")
        return tokenizer

    def verify(self, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Read every file: ids within the vocabulary, documents in order, checksums, and the tokenizer.

        `on_bytes` is told the bytes of each piece that was read.

        Raises:
            EntasisError: something does not fit; the line names the file and, where it can, the offset.
        """
        self.train.verify(on_bytes)
        self.held_out.verify(on_bytes)
        self.tokenizer()


def _check_sha256(path: Path, expected: str) -> None:
    found = file_sha256(path)
    if found != expected:
        raise EntasisError(
            f"{path}: checksum is {found[:12]}…, the manifest says {expected[:12]}…; the file is damaged"
        )
