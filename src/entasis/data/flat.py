"""Files of numbers, one after the other, read by position.

Reading takes just the wanted values with one positioned read (`pread`). A memory map kept open over a large file looks
like a leak, since every page that was ever touched counts as the process's memory; positioned reads leave the pages to
the operating system, so memory does not grow with the file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from entasis.errors import EntasisError

_CHUNK_BYTES = 1 << 22

Array = np.ndarray[tuple[int], np.dtype[Any]]
"""A one-dimensional array."""


class FlatFile:
    """`length` values of one type that begin at byte `start` of a file. Nothing is opened until something is read."""

    def __init__(self, path: Path, dtype: str, start: int, length: int) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.length = length
        self._start = start

    def read(self, start: int, stop: int) -> Array:
        """The values [start, stop), in the file's type.

        Raises:
            EntasisError: the file became shorter since it was opened, or is gone.
        """
        with self._opened() as descriptor:
            return self._read(descriptor, start, stop)

    def chunks(self) -> Iterator[tuple[int, Array]]:
        """All values in order, a few megabytes at a time, each piece with the position of its first value."""
        step = _CHUNK_BYTES // self.dtype.itemsize
        for start in range(0, self.length, step):
            yield start, self.read(start, min(start + step, self.length))

    def count_below(self, value: int) -> int:
        """How many values are below `value`; the file must be sorted. Reads about log2(length) values."""
        low, high = 0, self.length
        with self._opened() as descriptor:
            while low < high:
                middle = (low + high) // 2
                if self._read(descriptor, middle, middle + 1)[0] < value:
                    low = middle + 1
                else:
                    high = middle
        return low

    def byte(self, position: int) -> int:
        """The byte of the file at which a value stands."""
        return self._start + position * self.dtype.itemsize

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """A file descriptor, opened for each reading: thousands of shards would use up what a process may open."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise EntasisError(f"{self.path}: cannot be read ({error.strerror})") from error
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int, start: int, stop: int) -> Array:
        if not 0 <= start <= stop <= self.length:
            raise IndexError(f"[{start}, {stop}) of {self.length} values in {self.path.name}")
        wanted = (stop - start) * self.dtype.itemsize
        offset = self.byte(start)
        data = os.pread(descriptor, wanted, offset)
        while len(data) < wanted:  # a read may be cut short, by a signal or at 2 GiB
            more = os.pread(descriptor, wanted - len(data), offset + len(data))
            if not more:
                raise EntasisError(f"{self.path}: ends before byte {offset + wanted}; it was cut since it was opened")
            data += more
        return np.frombuffer(data, self.dtype)


def file_sha256(path: Path) -> str:
    """SHA-256 of a whole file, in hexadecimal (what `sha256sum` prints)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
