"""Token files of other programs, read as they are: nanoGPT's, llm.c's (and modded-nanogpt's) and Megatron's.

Such files carry no tokenizer and no text, so a run on them knows losses per token and nothing per byte, and writes no
text.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from entasis.data.dataset import DataFile, TokenSource
from entasis.data.flat import FlatFile
from entasis.data.megatron import MegatronStarts, data_file, index_file, open_index
from entasis.data.token_split import DocumentStarts, Int64Array, TokenSplit
from entasis.errors import ConfigError, EntasisError

ForeignFormat = Literal["nanogpt", "llmc", "megatron"]
LLMC_HEADER_BYTES: Final = 1024
LLMC_TOKENS: Final = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""Type of the tokens by magic number and version: GPT-2's files, and those with a larger vocabulary."""
DEFAULT_HELD_OUT: Final = 0.01
_BOUNDARY_TOKENS = 1 << 20
_WHOLE_BYTES, _SAMPLES, _SAMPLE_BYTES = 4 << 20, 64, 4096


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens of one or several files, one after the other."""

    files: list[FlatFile]
    starts: DocumentStarts | None

    @property
    def tokens(self) -> int:
        """Of all files."""
        return sum(file.length for file in self.files)


class MarkedStarts:
    """Documents found by the id that stands between them, where nothing else tells."""

    def __init__(self, files: Sequence[FlatFile], marker: int, *, opens: bool) -> None:
        """`opens`: the id is the first token of a document; otherwise it is the last one of the document before."""
        self._tokens = TokenSplit(files[0].path.parent, "row", files, 1 << 32, starts=None)
        self._marker = marker
        self._shift = 0 if opens else 1

    def between(self, start: int, stop: int) -> Int64Array:
        """As `DocumentStarts`. The very first token starts a document too."""
        first = max(start - self._shift, 0)
        marks = np.flatnonzero(self._tokens.read(first, max(stop - self._shift, first)) == self._marker)
        starts = marks.astype(np.int64) + first + self._shift
        return np.insert(starts, 0, 0) if start == 0 < stop and (not starts.size or starts[0]) else starts


def open_foreign(
    kind: ForeignFormat,
    path: str,
    *,
    vocab_size: int,
    held_out: str | float | None = None,
    eos_id: int | None = None,
) -> TokenSource:
    """Files of another program as the data of a run. Headers, lengths and a sample for the fingerprint are read.

    Args:
        kind: whose format.
        path: a file or a glob; Megatron's without ending or with `.bin`.
        vocab_size: the files do not say.
        held_out: the files to hold out, as `path`; or the share that is cut off at the end; None: a hundredth.
        eos_id: the id between documents, where there is one. nanoGPT's scripts write it after each document, llm.c's
            before each; Megatron's index says where documents start, and the id must then stand before.

    Raises:
        ConfigError: nothing is there, or a setting does not fit it.
        EntasisError: a file is not what it should be; names the file and the numbers.
    """
    row = _open_row(kind, path, vocab_size, eos_id)
    folder = row.files[0].path.parent
    common: dict[str, Any] = {"vocab_size": vocab_size, "starts_follow_end": kind != "llmc"}
    if isinstance(held_out, str):
        other = _open_row(kind, held_out, vocab_size, eos_id, "data.held_out")
        shared = {file.path.resolve() for file in row.files} & {file.path.resolve() for file in other.files}
        if shared:
            raise ConfigError(
                f"data.held_out: {min(shared)} is also in data.path; held-out text must not be trained on"
            )
        cut, said = row.tokens, [file.path.name for file in other.files]
        held = TokenSplit(folder, "held-out", other.files, starts=other.starts, **common)
        files = [*row.files, *other.files]
    else:
        share = DEFAULT_HELD_OUT if held_out is None else held_out
        cut = _tail(row, share)
        held = TokenSplit(folder, "held-out", row.files, starts=row.starts, first=cut, **common)
        files, said = row.files, [f"the last {row.tokens - cut:,} tokens"]
        if not 0 < cut < row.tokens:
            raise ConfigError(
                f"data.held_out: a share of {share} leaves nothing on one side of the {row.tokens} tokens in {path}"
            )
    train = TokenSplit(folder, "train", row.files, starts=row.starts, tokens=cut, **common)
    named = [file.path.name for file in row.files]
    return TokenSource(
        path=folder,
        name=" + ".join(named if len(named) <= 3 else [*named[:2], f"{len(named) - 2} more"]),
        vocab_size=vocab_size,
        eos_id=eos_id,
        fingerprint=_fingerprint([kind, vocab_size, eos_id, train.tokens, held.tokens], kind, files),
        train=train,
        held_out=held,
        request={"format": kind, "files": named, "held_out": said},
        files=tuple(DataFile(path.resolve(), None) for file in files for path in _paths(kind, file)),
    )


def find_files(kind: ForeignFormat, path: str, setting: str = "data.path") -> list[Path]:
    """What a path or glob names, sorted.

    Raises:
        ConfigError: nothing is there.
    """
    wanted = data_file(path) if kind == "megatron" else path
    if glob.has_magic(wanted) and not Path(wanted).exists():
        found = sorted(Path(match) for match in glob.glob(wanted, recursive=True))  # noqa: PTH207 - absolute patterns
        files = [file for file in found if file.is_file() and (kind != "megatron" or file.suffix == ".bin")]
    else:
        files = [Path(wanted)] if Path(wanted).is_file() else []
    if not files:
        raise ConfigError(f"{setting}: {path}: no such file; name a {kind} file, or several with a glob")
    return files


def open_file(kind: ForeignFormat, path: Path) -> FlatFile:
    """The tokens of one file; of Megatron's, as its index describes them.

    Raises:
        EntasisError: it is not a file of this format, or was cut.
    """
    try:
        return _READERS[kind](path)
    except OSError as error:
        raise EntasisError(f"{error.filename or path}: cannot be read ({error.strerror or error})") from error


def require_fitting(file: FlatFile, vocab_size: int) -> None:
    """Refuses a vocabulary that a file's type cannot hold: larger ids would have been cut off in writing.

    Raises:
        ConfigError: as said.
    """
    if vocab_size - 1 > np.iinfo(file.dtype).max:
        raise ConfigError(
            f"data.vocab_size: {file.path} holds {file.dtype.name}, which cannot hold all ids of a vocabulary of "
            f"{vocab_size}; it was made with another tokenizer, or its ids were cut off"
        )


def _open_row(kind: ForeignFormat, path: str, vocab_size: int, eos_id: int | None, setting: str = "data.path") -> Row:
    files = [open_file(kind, found) for found in find_files(kind, path, setting)]
    for file in files:
        require_fitting(file, vocab_size)
    if kind == "megatron":
        starts = MegatronStarts([(open_index(index_file(file.path)), file) for file in files])
        return Row(files, starts)
    marked = None if eos_id is None else MarkedStarts(files, eos_id, opens=kind == "llmc")
    return Row(files, marked)


def _open_nanogpt(path: Path) -> FlatFile:
    size = path.stat().st_size
    with path.open("rb") as file:
        magic = int.from_bytes(file.read(4), "little")
    if magic in {number for number, _ in LLMC_TOKENS}:
        raise EntasisError(f"{path}: begins with the header of llm.c's format; set data.format=llmc")
    if size % 2 or not size:
        raise EntasisError(f"{path}: {size} bytes are no row of 16-bit tokens; it was cut, or is of another format")
    return FlatFile(path, "<u2", 0, size // 2)


def _open_llmc(path: Path) -> FlatFile:
    size = path.stat().st_size
    with path.open("rb") as file:
        header = np.frombuffer(file.read(12).ljust(12, b"\0"), "<i4").tolist()
    dtype = LLMC_TOKENS.get((header[0], header[1]))
    if dtype is None or size < LLMC_HEADER_BYTES:
        raise EntasisError(
            f"{path}: begins with {header[0]}, {header[1]} instead of the magic number and version of llm.c's format "
            f"({' or '.join(f'{magic}, {version}' for magic, version in LLMC_TOKENS)})"
        )
    found = FlatFile(path, dtype, LLMC_HEADER_BYTES, header[2])
    if size != found.byte(header[2]) or header[2] < 1:
        raise EntasisError(
            f"{path}: {size} bytes long, but its header promises {header[2]} tokens, which end at byte "
            f"{found.byte(header[2])}; it was cut or damaged"
        )
    return found


def _open_megatron(path: Path) -> FlatFile:
    return open_index(index_file(path)).tokens_of(path)


_READERS: Final[dict[ForeignFormat, Callable[[Path], FlatFile]]] = {
    "nanogpt": _open_nanogpt,
    "llmc": _open_llmc,
    "megatron": _open_megatron,
}


def _tail(row: Row, share: float) -> int:
    """Where the held-out tail begins: at the share, or at the next document if one starts within a million tokens."""
    cut = row.tokens - max(1, round(share * row.tokens))
    if row.starts is None or cut < 1:
        return cut
    near = row.starts.between(cut, min(cut + _BOUNDARY_TOKENS, row.tokens))
    return int(near[0]) if near.size else cut


def _fingerprint(facts: list[object], kind: ForeignFormat, files: Sequence[FlatFile]) -> str:
    """Of the settings, and of each file's length and content: whole up to 4 MiB, samples of larger ones."""
    digest = hashlib.sha256(json.dumps(["entasis foreign", 1, *facts]).encode())
    for file in files:
        for path in _paths(kind, file):
            for piece in _samples(path):
                digest.update(piece)
    return digest.hexdigest()


def _paths(kind: ForeignFormat, file: FlatFile) -> tuple[Path, ...]:
    return (file.path, index_file(file.path)) if kind == "megatron" else (file.path,)


def _samples(path: Path) -> Iterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        yield size.to_bytes(8, "little")
        if size <= _WHOLE_BYTES:
            yield os.pread(descriptor, size, 0)
            return
        last = size - _SAMPLE_BYTES
        for number in range(_SAMPLES):
            yield os.pread(descriptor, _SAMPLE_BYTES, last * number // (_SAMPLES - 1))
    finally:
        os.close(descriptor)
