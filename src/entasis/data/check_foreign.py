"""Finding what is wrong with token files of other programs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from entasis.data.check import Finding, IdCheck, open_ended
from entasis.data.flat import FlatFile
from entasis.data.foreign import ForeignFormat, find_files, open_file, require_fitting
from entasis.data.megatron import MegatronIndex, MegatronStarts, index_file, open_index
from entasis.errors import EntasisError

_ENTRIES = 1 << 19


def check_foreign(
    kind: ForeignFormat, path: str, vocab_size: int | None, eos_id: int | None = None
) -> Iterator[Finding]:
    """Everything that is wrong with the files that a path or glob names.

    Without a vocabulary size, ids can be anything that their type holds. `eos_id` is for Megatron's files: the id with
    which every document must end.

    Raises:
        ConfigError: there is no such file.
    """
    for path_found in find_files(kind, path):
        try:
            yield from _check_file(kind, open_file(kind, path_found), vocab_size, eos_id)
        except EntasisError as error:
            yield Finding(path_found, str(error))


def _check_file(kind: ForeignFormat, file: FlatFile, vocab_size: int | None, eos_id: int | None) -> Iterator[Finding]:
    starts = None
    if kind == "megatron":
        index = open_index(index_file(file.path))
        wrong = [*_check_sequences(index), *_check_documents(index)]
        yield from wrong
        if eos_id is not None and not wrong:
            starts = MegatronStarts([(index, file)])
    if vocab_size is not None:
        require_fitting(file, vocab_size)
    ids = IdCheck(file, 1 << 63 if vocab_size is None else vocab_size)
    ends: list[Finding] = []
    for position, values in file.chunks():
        ids.read(position, values)
        if starts is not None and eos_id is not None and not ends:
            near = starts.between(position + 1, min(position + len(values) + 1, file.length)) - position
            ends = open_ended(file, position, values, near, eos_id)
    yield from ids.findings() or ends


def _check_sequences(index: MegatronIndex) -> list[Finding]:
    """They lie one after the other."""
    itemsize, end = np.dtype(index.dtype).itemsize, 0
    for start in range(0, index.lengths.length, _ENTRIES):
        stop = min(start + _ENTRIES, index.lengths.length)
        lengths, pointers = index.lengths.read(start, stop), index.pointers.read(start, stop)
        ends = end + np.cumsum(lengths.astype(np.int64)) * itemsize
        expected = np.concatenate([[end], ends[:-1]])
        wrong = (pointers != expected) | (lengths < 0)
        if wrong.any():
            entry = int(np.argmax(wrong))
            line = (
                f"{index.path}: sequence {start + entry} of {lengths[entry]} tokens lies at byte {pointers[entry]} "
                f"instead of {expected[entry]}; sequences that do not follow each other are not read"
            )
            return [Finding(index.path, line, start + entry, index.pointers.byte(start + entry))]
        end = int(ends[-1])
    return []


def _check_documents(index: MegatronIndex) -> list[Finding]:
    """They ascend from the first sequence to behind the last."""
    last, sequences = 0, index.lengths.length
    for position, documents in index.documents.chunks():
        wrong = (np.diff(documents, prepend=last) < 0) | (documents > sequences)
        if position == 0:
            wrong[0] |= documents[0] != 0
        if position + len(documents) == index.documents.length:
            wrong[-1] |= documents[-1] != sequences
        if wrong.any():
            entry = int(np.argmax(wrong))
            line = (
                f"{index.path}: document entry {position + entry} is {documents[entry]}; documents do not ascend from "
                f"sequence 0 to {sequences}"
            )
            return [Finding(index.path, line, position + entry, index.documents.byte(position + entry))]
        last = int(documents[-1])
    return []
