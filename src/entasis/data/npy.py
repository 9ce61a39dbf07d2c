"""Flat .npy files: written piece by piece, read by position (`FlatFile`)."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from entasis.data.flat import Array, FlatFile
from entasis.errors import EntasisError

_HEADER_BYTES = 128  # fixed, so that it can be written again when the length is known; a multiple of 64 as numpy wants


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


class NpyFile(FlatFile):
    """A one-dimensional .npy file, read by position.

    Opening reads the header only and compares it with what is expected.

    Raises:
        EntasisError: the file is missing, is no flat .npy file, or has another type or length than expected; the line
            names the file and the numbers.
    """

    def __init__(self, path: Path, dtype: str, length: int) -> None:
        try:
            with path.open("rb") as file:
                if npy_format.read_magic(file) != (1, 0):
                    raise ValueError("not version 1.0 of the format")
                shape, fortran, found = npy_format.read_array_header_1_0(file)
                start = file.tell()
            size = path.stat().st_size
        except OSError as error:
            raise EntasisError(f"{path}: cannot be read ({error.strerror}); prepare the data again") from error
        except ValueError as error:
            raise EntasisError(f"{path}: not a .npy file ({error}); prepare the data again") from error
        super().__init__(path, dtype, start, length)
        if found != self.dtype or fortran or shape != (length,):
            raise EntasisError(
                f"{path}: holds {found} of shape {shape}, the manifest says {self.dtype} of shape ({length},); "
                "prepare the data again"
            )
        expected = self.byte(length)
        if size != expected:
            raise EntasisError(f"{path}: {size} bytes long instead of {expected}; it was cut or damaged")
