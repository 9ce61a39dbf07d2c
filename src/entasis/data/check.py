"""Finding what is wrong with prepared data: every file is read whole, and everything that does not fit is said."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from entasis.data.dataset import load_own_tokenizer, open_shard
from entasis.data.flat import Array, FlatFile, file_sha256
from entasis.data.manifest import MANIFEST_FILE, TOKENIZER_FOLDER, Manifest, SplitRecord, read_manifest
from entasis.data.shards import DISK_DTYPE, DOCUMENTS_DTYPE
from entasis.data.token_split import Int64Array, RecordedStarts, out_of_range
from entasis.errors import EntasisError


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that does not fit."""

    file: Path
    line: str
    """What and where, naming the file and, where there is one, the offset."""
    offset: int | None = None
    """In the file, in tokens; of an index or a list of documents, in entries."""
    byte: int | None = None
    """The same in bytes."""


class IdCheck:
    """Counts what is outside the vocabulary while a file is read."""

    def __init__(self, file: FlatFile, vocab_size: int) -> None:
        self._file = file
        self._vocab_size = vocab_size
        self._first: tuple[int, int] | None = None
        self._count = 0

    def read(self, position: int, values: Array) -> None:
        """Takes the values at a position of the file."""
        wrong = (values >= self._vocab_size) | (values < 0)
        found = int(np.count_nonzero(wrong))
        if found and self._first is None:
            place = int(np.argmax(wrong))
            self._first = position + place, int(values[place])
        self._count += found

    def findings(self) -> list[Finding]:
        """One for the file, if there is anything."""
        if self._first is None:
            return []
        offset, value = self._first
        line = out_of_range(self._file.path, offset, value, self._vocab_size)
        if self._count > 1:
            line += f" ({self._count:,} such ids in all)"
        return [Finding(self._file.path, line, offset, self._file.byte(offset))]


def open_ended(file: FlatFile, position: int, values: Array, starts: Int64Array, eos_id: int) -> list[Finding]:
    """Whether each document that starts behind one of the values has an end token before it; at most one finding.

    Args:
        file: in which the values stand.
        position: of the first one.
        values: of the file.
        starts: relative to the first value, from 1 to the number of values.
        eos_id: the end token.
    """
    wrong = starts[values[starts - 1] != eos_id]
    if not wrong.size:
        return []
    offset = position + int(wrong[0]) - 1
    line = (
        f"{file.path}: token {offset} is {values[wrong[0] - 1]} instead of the end token {eos_id}, but a document is "
        "said to end there"
    )
    return [Finding(file.path, line, offset, file.byte(offset))]


def check_prepared(folder: Path) -> Iterator[Finding]:
    """Everything that is wrong with a prepared folder; of a damaged manifest nothing else can be told."""
    try:
        manifest = read_manifest(folder)
    except EntasisError as error:
        yield Finding(folder / MANIFEST_FILE, str(error))
        return
    yield from _check_split(folder, manifest, manifest.train, "train")
    yield from _check_split(folder, manifest, manifest.held_out, "held-out")
    try:
        load_own_tokenizer(folder, manifest)
    except EntasisError as error:
        yield Finding(folder / TOKENIZER_FOLDER, str(error))


def _check_split(folder: Path, manifest: Manifest, record: SplitRecord, name: str) -> Iterator[Finding]:
    content = hashlib.sha256()
    starts, found = _check_documents(folder, record)
    ends: list[Finding] = []
    row = 0
    for shard in record.shards:
        try:
            file = open_shard(folder, shard.file, DISK_DTYPE[manifest.dtype], shard.tokens)
            ids = IdCheck(file, manifest.vocab_size)
            digest = hashlib.sha256(_head(file))
            for position, values in file.chunks():
                data = values.tobytes()
                digest.update(data)
                content.update(data)
                ids.read(position, values)
                if starts is not None:
                    at = row + position
                    near = starts.between(at + 1, min(at + len(values) + 1, record.tokens)) - at
                    ends += open_ended(file, position, values, near, manifest.eos_id)
            found += ids.findings() + _checksum(file.path, digest.hexdigest(), shard.sha256)
        except EntasisError as error:
            found.append(Finding(folder / shard.file, str(error)))
        row += shard.tokens
    if not found and content.hexdigest() != record.content:
        found.append(Finding(folder, f"{folder}: {name}: shards are not in the order that the manifest describes"))
    # In a damaged file, ends of documents that are not there say nothing new.
    yield from found or ends


def _check_documents(folder: Path, record: SplitRecord) -> tuple[RecordedStarts | None, list[Finding]]:
    """The starts, if they can be used, and what is wrong with their file."""
    try:
        file = open_shard(folder, record.documents.file, DOCUMENTS_DTYPE, record.documents.count)
        found = _checksum(file.path, file_sha256(file.path), record.documents.sha256)
        last = -1
        for position, starts in file.chunks():
            wrong = (np.diff(starts, prepend=last) <= 0) | (starts >= record.tokens) | (starts < 0)
            if position == 0:
                wrong[0] |= starts[0] != 0
            if wrong.any():
                entry = int(np.argmax(wrong))
                line = (
                    f"{file.path}: entry {position + entry} is {starts[entry]}; starts of documents do not ascend from "
                    f"0 to below {record.tokens}"
                )
                return None, [Finding(file.path, line, position + entry, file.byte(position + entry)), *found]
            last = int(starts[-1])
    except EntasisError as error:
        return None, [Finding(folder / record.documents.file, str(error))]
    return RecordedStarts(file), found


def _checksum(path: Path, found: str, expected: str) -> list[Finding]:
    if found == expected:
        return []
    line = f"{path}: checksum is {found[:12]}…, the manifest says {expected[:12]}…; the file is damaged"
    return [Finding(path, line)]


def _head(file: FlatFile) -> bytes:
    with file.path.open("rb") as opened:
        return opened.read(file.byte(0))
