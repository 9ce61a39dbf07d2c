"""From what the user names (files, folders, globs, corpora, datasets) to documents, one text at a time."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from entasis.data.compressed import BROKEN, ENDINGS, open_plain
from entasis.data.corpora import CORPORA
from entasis.data.hub import DATASETS, HubDataset, find_dataset
from entasis.data.parquet import parquet_documents
from entasis.errors import ConfigError, EntasisError

SUFFIXES = (*(f".{kind}{ending}" for kind in ("txt", "jsonl") for ending in ENDINGS), ".parquet")
_TEXT_SUFFIXES = tuple(suffix for suffix in SUFFIXES if suffix.startswith(".txt"))
_NAMES = (*CORPORA, *DATASETS)
_GLOB_CHARACTERS = set("*?[")

Item = Path | str | HubDataset
"""A file, a name of `CORPORA`, or a dataset."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The texts of one preparation in a fixed order: sources as given, files within a source sorted by path.

    A name of `CORPORA` or `DATASETS` means that corpus or dataset; a folder of the same name is written `./web-bible`.
    """

    items: tuple[Item, ...]
    text_field: str = "text"
    """Field of a JSON record, or column of a table, that holds the text."""
    limit: int | None = None
    """Only so many documents, the first ones of all sources together; those without any text count."""
    name: str = field(default="", compare=False)
    """What the user named, shortened to a word or a few."""

    @classmethod
    def find(cls, given: tuple[str, ...], text_field: str = "text", limit: int | None = None) -> Sources:
        """Resolve what the user gave.

        Raises:
            ConfigError: something is not there, is of a kind that cannot be read, or is given twice.
        """
        if limit is not None and limit < 1:
            raise ConfigError(f"--documents: expected at least 1, got {limit}")
        items = [item for source in given for item in _resolve(source)]
        if not items:
            raise ConfigError("SOURCE: nothing given; name files, folders, globs or a corpus such as web-bible")
        seen: set[Item] = set()
        for item in items:
            key = item.resolve() if isinstance(item, Path) else item
            if key in seen:  # twice the same text could stand on both sides of the split
                raise ConfigError(f"SOURCE: {item} is given twice")
            seen.add(key)
        names = [_short_name(source) for source in given]
        shown = names if len(names) <= 3 else [*names[:2], f"{len(names) - 2} more"]
        return cls(tuple(items), text_field, limit, " + ".join(shown))

    @property
    def streamed(self) -> bool:
        """Whether some of the text comes from the network."""
        return any(isinstance(item, HubDataset) for item in self.items)

    def identity(self) -> list[dict[str, str | int]]:
        """What tells these sources from others: names and sizes in bytes of files, versions of corpora and datasets."""
        return [_identity(item) for item in self.items]

    def documents(self) -> Iterator[str]:
        """Every document's text, in order; documents without any text are left out by the caller.

        Raises:
            EntasisError: a file is not UTF-8, holds a broken record, or cannot be read; the line names file and line.
        """
        yield from islice((text for item in self.items for text in _documents(item, self.text_field)), self.limit)


def _identity(item: Item) -> dict[str, str | int]:
    if isinstance(item, Path):
        return {"file": item.name, "bytes": item.stat().st_size}
    if isinstance(item, HubDataset):
        return item.identity()
    return {"corpus": item, "version": CORPORA[item].version}


def _documents(item: Item, text_field: str) -> Iterator[str]:
    if isinstance(item, HubDataset):
        return item.documents(text_field)
    if isinstance(item, str):
        return iter(CORPORA[item].documents())
    if item.name.endswith(_TEXT_SUFFIXES):
        return _text_documents(item)
    if item.name.endswith(".parquet"):
        return parquet_documents(item, text_field)
    return _json_documents(item, text_field)


def _short_name(source: str) -> str:
    if source in CORPORA:
        return source
    dataset = find_dataset(source)
    return dataset.name if dataset else Path(source).resolve().name


def _resolve(source: str) -> list[Item]:
    if source in CORPORA:
        return [source]
    dataset = find_dataset(source)
    if dataset:
        return [dataset]
    path = Path(source)
    if path.is_dir():
        return list(_readable_files(source, [file for file in path.rglob("*") if not _hidden(file.relative_to(path))]))
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise ConfigError(f"SOURCE: {source}: cannot read this kind of file; known: {', '.join(SUFFIXES)}")
        return [path]
    if _GLOB_CHARACTERS & set(source):
        matches = glob.glob(source, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        return list(_readable_files(source, [Path(match) for match in matches]))
    raise ConfigError(f"SOURCE: {source} is neither a file, a folder nor a corpus ({', '.join(_NAMES)}, hf:OWNER/NAME)")


def _readable_files(source: str, candidates: list[Path]) -> list[Path]:
    files = [path for path in candidates if path.is_file() and path.name.endswith(SUFFIXES)]
    if not files:
        raise ConfigError(f"SOURCE: {source} holds no file that ends in {', '.join(SUFFIXES)}")
    return sorted(files, key=Path.as_posix)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _text_documents(path: Path) -> Iterator[str]:
    """Paragraph blocks between blank lines."""
    lines: list[str] = []
    for _, line in _lines(path):
        if line.strip():
            lines.append(line)
        elif lines:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)


def _json_documents(path: Path, text_field: str) -> Iterator[str]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise EntasisError(f"{where}: not a JSON record ({error})") from error
        if not isinstance(record, dict):
            raise EntasisError(f"{where}: expected an object, got {type(record).__name__}")
        if text_field not in record:
            known = ", ".join(list(record)[:10]) or "none"
            raise EntasisError(f"{where}: no field {text_field!r} (it has: {known}); choose one with --text-field")
        text = record[text_field]
        if not isinstance(text, str):
            raise EntasisError(f"{where}: field {text_field!r} holds {type(text).__name__}, not text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise EntasisError(
                f"{where}: half a surrogate pair at character {error.start}, which is no text"
            ) from error
        yield text


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines without their ends, numbered from 1; a byte order mark at the beginning is dropped."""
    try:
        with open_plain(path) as file:
            for number, raw in enumerate(file, start=1):
                line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                try:
                    yield number, line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
                except UnicodeDecodeError as error:
                    raise EntasisError(
                        f"{path}, line {number}: not UTF-8 (byte 0x{line[error.start]:02x}); convert the file"
                    ) from error
    except BROKEN as error:
        kind = "gzip" if path.name.endswith(".gz") else "Zstandard"
        raise EntasisError(f"{path}: broken {kind} file ({error})") from error
    except OSError as error:
        raise EntasisError(f"{path}: cannot be read ({error.strerror})") from error
