"""Writing one side of the split: tokens into shards, starts of documents beside them, counts on the way."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import numpy as np

from entasis.data.flat import Array, file_sha256
from entasis.data.manifest import DocumentsRecord, ShardRecord, SplitRecord
from entasis.data.npy import NpyWriter
from entasis.errors import EntasisError

LARGEST_UINT16 = 65_535
DISK_DTYPE = {"uint16": "<u2", "uint32": "<u4"}
DOCUMENTS_DTYPE = "<i8"


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The type that holds every id of a vocabulary: uint16 as long as the largest possible id fits."""
    return "uint16" if vocab_size - 1 <= LARGEST_UINT16 else "uint32"


def as_tokens(ids: np.ndarray[Any, np.dtype[np.integer[Any]]], vocab_size: int) -> Array:
    """Ids in the type that is stored for this vocabulary.

    Raises:
        EntasisError: an id lies outside the vocabulary, so that the cast could wrap.
    """
    if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise EntasisError(f"the tokenizer gave the id {wrong}, outside its vocabulary of {vocab_size}")
    return ids.astype(DISK_DTYPE[token_dtype(vocab_size)])


class SplitWriter:
    """Collects one split's documents in order and writes them as they come."""

    def __init__(self, folder: Path, prefix: str, *, vocab_size: int, shard_tokens: int) -> None:
        """Files are called `PREFIX-00000.npy` (at most `shard_tokens` each) and `PREFIX-documents.npy`."""
        self._folder = folder
        self._prefix = prefix
        self._vocab_size = vocab_size
        self._dtype = DISK_DTYPE[token_dtype(vocab_size)]
        self._shard_tokens = shard_tokens
        self._tokens = 0
        self._bytes = 0
        self._shard: NpyWriter | None = None
        self._shards: list[ShardRecord] = []
        self._documents = NpyWriter(folder / f"{prefix}-documents.npy", DOCUMENTS_DTYPE)
        self._content = hashlib.sha256()
        self.token_counts = np.zeros(vocab_size, np.int64)
        """How often each id occurred."""

    def add(self, ids: np.ndarray[Any, np.dtype[np.integer[Any]]], lengths: Array, text_bytes: int) -> None:
        """Add whole documents: their ids one after the other, their lengths in tokens, the bytes of their text."""
        tokens = as_tokens(ids, self._vocab_size)
        if len(tokens) != int(lengths.sum()):
            raise ValueError(f"{len(tokens)} tokens in documents of {int(lengths.sum())}")
        self._documents.append((self._tokens + np.cumsum(lengths) - lengths).astype(DOCUMENTS_DTYPE))
        self._tokens += len(tokens)
        self._bytes += text_bytes
        self._content.update(tokens.tobytes())
        self.token_counts += np.bincount(tokens, minlength=self._vocab_size)
        while len(tokens):
            if self._shard is None:
                self._shard = NpyWriter(self._folder / f"{self._prefix}-{len(self._shards):05d}.npy", self._dtype)
            room = self._shard_tokens - self._shard.length
            self._shard.append(tokens[:room])
            tokens = tokens[room:]
            if self._shard.length == self._shard_tokens:
                self._close_shard(self._shard)

    def finish(self) -> SplitRecord:
        """Close the files and describe them.

        Raises:
            EntasisError: there is not a single token.
        """
        if not self._tokens:
            raise EntasisError(f"the {self._prefix} text gives no token with this tokenizer")
        if self._shard is not None:
            self._close_shard(self._shard)
        self._documents.close()
        documents = self._documents
        return SplitRecord(
            tokens=self._tokens,
            bytes=self._bytes,
            content=self._content.hexdigest(),
            shards=self._shards,
            documents=DocumentsRecord(
                file=documents.path.name, count=documents.length, sha256=file_sha256(documents.path)
            ),
        )

    def abandon(self) -> None:
        """Let go of the open files after a failure."""
        self._documents.abandon()
        if self._shard is not None:
            self._shard.abandon()

    def _close_shard(self, shard: NpyWriter) -> None:
        shard.close()
        self._shards.append(ShardRecord(file=shard.path.name, tokens=shard.length, sha256=file_sha256(shard.path)))
        self._shard = None
