"""Whether a run's files of tokens are still those that it began with, told without reading what nobody touched.

`data.json` in the run folder keeps size and time of each file. Where a run goes on and one of them changed, the file is
read and compared with its checksum; files of other programs have none, and there the change is said.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from entasis.data.dataset import TokenSource
from entasis.data.flat import file_sha256
from entasis.errors import EntasisError
from entasis.run.files import read_object, write_json
from entasis.run.folder import RunFolder


def record_data(folder: RunFolder, data: TokenSource) -> None:
    """Writes `data.json`."""
    write_json(folder.data_file, {"fingerprint": data.fingerprint, "files": _states(data)})


def check_data(folder: RunFolder, data: TokenSource, say: Callable[[str], None], *, accept: bool = False) -> None:
    """Compares the files with `data.json`, if that is there and of this data; with `accept`, what changed is only said.

    Raises:
        EntasisError: a file's content is not what its checksum says; names it.
    """
    if not folder.data_file.exists():
        return
    saved = read_object(folder.data_file)
    if saved.get("fingerprint") != data.fingerprint:
        return  # other data altogether, which the checkpoint's fingerprint tells
    before, now = saved.get("files", {}), _states(data)
    touched = [file for file in data.files if before.get(str(file.path)) != now[str(file.path)]]
    if not touched:
        return
    say(f"{len(touched)} of {len(now)} data files are newer than the run, or elsewhere; comparing their content")
    for file in touched:
        if file.sha256 is None:
            say(f"{file.path}: has no checksum; its length and samples of it are as they were")
        elif file_sha256(file.path) != file.sha256:
            change = f"{file.path}: changed since the run began, and is not what the manifest says"
            if not accept:
                raise EntasisError(f"{change}; restore it (`entasis data check` tells what else is wrong)")
            say(f"{change}; accepted")


def _states(data: TokenSource) -> dict[str, list[int]]:
    return {str(file.path): _state(file.path) for file in data.files}


def _state(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
