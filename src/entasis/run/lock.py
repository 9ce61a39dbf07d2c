"""The lock of a folder: one process at a time works in it, and a start that fails at once leaves no trace of itself."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from entasis.errors import ConfigError, EntasisError
from entasis.run.files import naming

_LOCK = ".lock"
_TRACES = {_LOCK, "log.txt"}
"""What a start leaves that fails before it writes what the run is."""


@contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Holds a folder (made if needed) for this process. The kernel frees the lock however the process ends.

    Where the block fails and has written no more than its log, what was made here is removed again.

    Raises:
        ConfigError: the folder cannot be made.
        EntasisError: another process holds it.
    """
    file, made = _open_locked(path)
    with file:
        before = {entry.name for entry in path.iterdir()}
        if file.tell() == 0:  # whoever held the folder before wrote its number
            before.discard(_LOCK)
        try:
            with naming(path / _LOCK):
                file.seek(0)
                file.truncate()
                file.write(str(os.getpid()))
                file.flush()
            yield
        except BaseException:  # Ctrl-C too
            with suppress(OSError):  # the error that is on its way is the one to show
                _remove_traces(path, before, made)
            raise


def _open_locked(path: Path) -> tuple[TextIO, list[Path]]:
    """The lock's file, locked, and the folders that had to be made for it, the innermost first."""
    made: list[Path] = []
    while True:
        missing = [each for each in (path, *path.parents) if not each.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"out: {path} cannot be made ({(error.strerror or str(error)).lower()}); choose another folder"
            ) from None
        made = made or missing
        try:
            file = (path / _LOCK).open("a+")
        except FileNotFoundError:  # another start has just failed and removed the folder
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            file.close()
            raise EntasisError(
                f"{path}: process {owner} is working in this run folder; wait for it or choose another `out`"
            ) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), (path / _LOCK).stat()):
                return file, made
        file.close()  # between opening and locking the other start removed it


def _remove_traces(path: Path, before: set[str], made: list[Path]) -> None:
    """Unless there is more than traces: that is kept, and the lock's file with it."""
    new = {entry.name for entry in path.iterdir()} - before
    if new <= _TRACES:
        for name in new:
            (path / name).unlink()
        for folder in made:
            folder.rmdir()  # one that somebody else has come to use is not empty, and ends this
