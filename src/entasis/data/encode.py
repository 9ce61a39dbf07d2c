"""Text to tokens in several processes, in the order of the text whatever their number."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from entasis.data.flat import Array
from entasis.data.tokenizers import Tokenizer, load_tokenizer
from entasis.errors import EntasisError

BATCH_BYTES = 1 << 20
_WAITING_PER_PROCESS = 3


class Piece(NamedTuple):
    """A document, or the head or tail of one."""

    text: str
    bytes: int
    held_out: bool
    closed: bool
    """Whether the end-of-document token follows; it does not after the head of a document that was cut."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a batch of pieces."""

    ids: np.ndarray[Any, np.dtype[np.integer[Any]]]
    """All pieces one after the other."""
    lengths: Array
    """Tokens of each piece."""
    special: Counter[str]
    """Written control tokens in the text."""


def encode(tokenizer: Tokenizer, batch: list[Piece]) -> Encoded:
    """Encode one batch in this process."""
    texts = [piece.text for piece in batch]
    rows = tokenizer.encode_batch(texts)
    special: Counter[str] = Counter()
    for text in texts:
        special += tokenizer.count_special(text)
    for row, piece in zip(rows, batch, strict=True):
        if piece.closed:
            row.append(tokenizer.eos_id)
    lengths = np.array([len(row) for row in rows], np.int64)
    ids = np.concatenate([np.array(row, np.int64) for row in rows])
    # A quarter of the bytes to carry between processes; out-of-range ids stay out of range and are refused on writing.
    fits = tokenizer.vocab_size <= 1 << 16 and ids.min() >= 0 and ids.max() < 1 << 16
    return Encoded(ids.astype(np.uint16) if fits else ids, lengths, special)


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces to about a megabyte of text."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.bytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_all(
    pieces: Iterable[Piece], tokenizer_folder: Path, processes: int
) -> Generator[tuple[list[Piece], Encoded], None, None]:
    """Encode all pieces in order; at most a few batches per process are in memory at a time.

    Raises:
        EntasisError: a worker process died, or failed with such an error.
    """
    if processes == 1:
        tokenizer = load_tokenizer(tokenizer_folder)
        for batch in batches(pieces):
            yield batch, encode(tokenizer, batch)
        return
    # Fresh processes: forking after the tokenizer's own threads have run is not safe.
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(tokenizer_folder,)
    )
    waiting: deque[tuple[list[Piece], Future[Encoded]]] = deque()
    try:
        for batch in batches(pieces):
            waiting.append((batch, pool.submit(_encode_here, batch)))
            if len(waiting) >= _WAITING_PER_PROCESS * processes:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    except BrokenProcessPool as error:
        raise EntasisError(
            "a worker process died while encoding (out of memory?); try a smaller --processes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker: list[Tokenizer] = []  # the tokenizer of this worker process


def _start_worker(tokenizer_folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends this one
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a worker: the processes are the parallelism
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _worker.append(load_tokenizer(tokenizer_folder))


def _leave_with_parent() -> None:
    """End this process when its parent is gone, killed for instance; it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _encode_here(batch: list[Piece]) -> Encoded:
    return encode(_worker[0], batch)
