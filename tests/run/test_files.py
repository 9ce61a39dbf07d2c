"""Files that are complete or absent."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from entasis.run.files import write_json, write_text


def test_writes_and_replaces(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_json(file, {"b": [1, 2.5, None]})
    assert file.read_text(encoding="utf-8") == '{\n "b": [\n  1,\n  2.5,\n  null\n ]\n}\n'
    write_text(file, "é\n")
    assert file.read_bytes() == "é\n".encode()
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_numbers_that_json_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failed_or_killed_write_leaves_the_old_content(
    name: str, in_child: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "a.txt"
    write_text(file, "old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        with pytest.raises(OSError, match="No space"):
            write_text(file, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]

    with monkeypatch.context() as patch:
        patch.setattr(os, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert in_child(lambda: write_text(file, "new")) == -signal.SIGKILL
    assert file.read_text(encoding="utf-8") == "old"
    write_text(file, "newer")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"], "the killed process's leftover is gone"
