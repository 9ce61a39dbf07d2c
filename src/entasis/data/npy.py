"""Flat .npy files: written piece by piece, read by position.

Reading takes just the wanted values with one positioned read (`pread`). A memory map kept open over a large file looks
like a leak, since every page that was ever touched counts as the process's memory; positioned reads leave the pages to
the operating system, so memory does not grow with the file.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from entasis.errors import EntasisError

_HEADER_BYTES = 128  # fixed, so that it can be written again when the length is known; a multiple of 64 as numpy wants
_CHUNK_BYTES = 1 << 22

Array = np.ndarray[tuple[int], np.dtype[Any]]
"""A one-dimensional array."""


def _header(dtype: np.dtype[Any], length: int) -> bytes:
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({length},), }}"
    body = text.encode("latin-1").ljust(_HEADER_BYTES - 11) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(body)) + body


class NpyWriter:
    """A one-dimensional .npy file that grows by `append` and is valid after `close`."""

    def __init__(self, path: Path, dtype: str) -> None:
        """Create (or replace) the file; `dtype` is a numpy type string with its byte order, such as `<u2`."""
        self.path = path
        self.dtype = np.dtype(dtype)
        self.length = 0
        self._file = path.open("wb")
        self._file.write(_header(self.dtype, 0))

    def append(self, values: Array) -> None:
        """Add values (any length) of exactly this file's type: nothing is cast here, so that nothing can wrap."""
        if values.dtype != self.dtype:
            raise TypeError(f"{self.path.name} holds {self.dtype}, not {values.dtype}")
        self._file.write(values.tobytes())
        self.length += len(values)

    def close(self) -> None:
        """Write the final header."""
        self._file.seek(0)
        self._file.write(_header(self.dtype, self.length))
        self._file.close()

    def abandon(self) -> None:
        """Close the file as it is; it is not valid then."""
        self._file.close()


class NpyFile:
    """A one-dimensional .npy file, read by position.

    Opening reads the header only and compares it with what is expected.

    Raises:
        EntasisError: the file is missing, is no flat .npy file, or has another type or length than expected; the line
            names the file and the numbers.
    """

    def __init__(self, path: Path, dtype: str, length: int) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.length = length
        try:
            with path.open("rb") as file:
                if npy_format.read_magic(file) != (1, 0):
                    raise ValueError("not version 1.0 of the format")
                shape, fortran, found = npy_format.read_array_header_1_0(file)
                self._start = file.tell()
            size = path.stat().st_size
        except OSError as error:
            raise EntasisError(f"{path}: cannot be read ({error.strerror}); prepare the data again") from error
        except ValueError as error:
            raise EntasisError(f"{path}: not a .npy file ({error}); prepare the data again") from error
        if found != self.dtype or fortran or shape != (length,):
            raise EntasisError(
                f"{path}: holds {found} of shape {shape}, the manifest says {self.dtype} of shape ({length},); "
                "prepare the data again"
            )
        expected = self._start + length * self.dtype.itemsize
        if size != expected:
            raise EntasisError(f"{path}: {size} bytes long instead of {expected}; it was cut or damaged")

    def read(self, start: int, stop: int) -> Array:
        """The values [start, stop), in the file's type.

        Raises:
            EntasisError: the file became shorter since it was opened.
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
        offset = self._start + start * self.dtype.itemsize
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
