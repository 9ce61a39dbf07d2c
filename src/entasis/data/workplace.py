"""A folder that is there completely or not at all: filled beside its place under another name, then renamed."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from entasis.errors import EntasisError


@contextmanager
def complete_or_absent(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside `target` that becomes `target` when the block ends without an error.

    The kernel locks the folder for this process. What a killed process left behind holds no lock and is used again;
    while another process works, this one is refused.

    Raises:
        EntasisError: another process prepares the same folder, or `target` is in the way and `replace` is not set.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_name(f".{target.name}.preparing")
    lock = _lock(work, target)
    try:
        _empty(work)
        yield work
        for path in (*work.rglob("*"), work):
            _sync(path)
        old = target.with_name(f".{target.name}.replaced")
        if target.exists() and any(target.iterdir()):
            if not replace:
                raise EntasisError(f"{target}: appeared in the meantime; --force replaces it")
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        work.rename(target)
        _sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:  # Ctrl-C too: nothing half-done stays
        shutil.rmtree(work, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _lock(work: Path, target: Path) -> int:
    """An open descriptor of the folder `work` with an exclusive lock on it."""
    while True:
        work.mkdir(exist_ok=True)
        try:
            descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # the other process has just finished with it
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise EntasisError(f"{target}: another process is preparing this folder") from error
        try:
            if os.path.samestat(os.fstat(descriptor), work.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)  # between opening and locking the other process renamed it


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
