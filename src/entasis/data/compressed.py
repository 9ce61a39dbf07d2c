"""Files that may be compressed, read as plain bytes: gzip and Zstandard, recognised by the end of their names."""

from __future__ import annotations

import gzip
import io
import zlib
from collections import deque
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import zstandard

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

ENDINGS = ("", ".gz", ".zst")
"""What may follow the ending of a text file."""
BROKEN = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)
"""What reading a file raises that was cut or damaged."""
_CHUNK_BYTES = 1 << 16
_LARGEST_WINDOW = 1 << 31  # what `zstd --long=31` writes; the library refuses large windows unless told otherwise


def open_plain(path: Path) -> IO[bytes]:
    """The file's content, decompressed while it is read; reading raises one of `BROKEN` where it is damaged."""
    if path.name.endswith(".gz"):
        return cast(IO[bytes], gzip.open(path))
    if path.name.endswith(".zst"):
        return io.BufferedReader(_ZstdReader(path))
    return path.open("rb")


class _ZstdReader(io.RawIOBase):
    """All frames of a Zstandard file one after the other.

    The library's own reader takes the end of a cut file for the end of its content; this one tells them apart.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._rest = b""
        """Compressed bytes that were read and belong to the next frame."""
        self._ready: deque[memoryview] = deque()

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill the beginning of `buffer`; 0 at the end of the file.

        Raises:
            EOFError: the file ends within a frame.
            zstandard.ZstdError: it is damaged.
        """
        while not self._ready:
            compressed = self._rest or self._file.read(_CHUNK_BYTES)
            self._rest = b""
            if not compressed:
                if self._frame is not None:
                    raise EOFError("it ends before its content does")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()
            content = self._frame.decompress(compressed)
            if self._frame.eof:
                self._rest = self._frame.unused_data
                self._frame = None
            if content:
                self._ready.append(memoryview(content))
        target = memoryview(buffer).cast("B")
        piece = self._ready.popleft()
        count = min(len(target), len(piece))
        target[:count] = piece[:count]
        if count < len(piece):
            self._ready.appendleft(piece[count:])
        return count

    def close(self) -> None:
        """Close the file beneath too."""
        self._file.close()
        super().close()
