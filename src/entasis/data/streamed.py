"""Text from the network is read once: a compressed copy serves the several readings of a preparation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import zstandard

from entasis.data.documents import Sources

_COPY = "streamed.jsonl.zst"
_REPORT_BYTES = 1 << 20


@contextmanager
def read_once(sources: Sources, folder: Path, progress: Callable[[int, None], None]) -> Iterator[Sources]:
    """The same documents from a file in `folder`, which is there until the block ends; `sources` if all is local.

    `progress` is told the bytes of text that have been read.

    Raises:
        EntasisError: a source cannot be read.
    """
    if not sources.streamed:
        yield sources
        return
    copy = folder / _COPY
    done = reported = 0
    with zstandard.open(copy, "wb") as file:
        for text in sources.documents():
            record = json.dumps({sources.text_field: text}, ensure_ascii=False).encode() + b"\n"
            file.write(record)
            done += len(record)
            if done - reported >= _REPORT_BYTES:
                progress(done, None)
                reported = done
    yield replace(sources, items=(copy,))
    copy.unlink()
