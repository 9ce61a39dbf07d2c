"""Writing files so that they are complete or absent, also when the machine stops in the middle."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from entasis.errors import EntasisError


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Puts the file's name to what the system refuses: a write to a full disk fails without one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Writes a file by temporary name, fsync and rename: readers see the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")  # one name, so that what a killed process left is written over
    try:
        with naming(path), temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_json(path: Path, data: Any) -> None:  # noqa: ANN401 - any plain data
    """Plain data as an indented JSON file, written as `write_text` does."""
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def read_object(path: Path) -> dict[str, Any]:
    """An object of names and values from a JSON file.

    Raises:
        EntasisError: the file is missing, or is something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EntasisError(f"{path}: missing") from None
    except (ValueError, RecursionError) as error:
        raise EntasisError(f"{path}: not JSON ({error})") from None
    if not isinstance(data, dict):
        raise EntasisError(f"{path}: expected an object of names and values")
    return data


def sync_file(path: Path) -> None:
    """Forces a written file to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Forces a folder's entries (new names, renames) to the disk."""
    sync_file(path)
