"""What the tests of faults share: processes that die at a chosen place, and what they leave."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from entasis.evaluate import sources
from entasis.run import checkpoint
from entasis.run.checkpoint import load_newest
from entasis.run.folder import RunFolder
from entasis.train import saver
from entasis.train.parallel import SpreadModel

# Whatever touches the disk, each pass of an accumulation, each evaluation.
_PLACES: tuple[tuple[object, str], ...] = (
    (os, "fsync"),
    (os, "rename"),
    (os, "replace"),
    (os, "unlink"),
    (os, "rmdir"),
    (os, "mkdir"),
    (checkpoint, "save_file"),
    (SpreadModel, "loss_of_pass"),
    (sources, "held_out_loss"),
    (saver, "save_checkpoint"),
    (RunFolder, "append_metrics"),
    (RunFolder, "sync_metrics"),
)


@pytest.fixture(scope="session")
def watch() -> Callable[..., list[str]]:
    """`watch(patch, note, die_at)`: notes each checkpoint that got its name, and may die at a place.

    SIGKILL comes before or after the `die_at`-th of all calls that touch the disk, are a pass or an evaluation, or are
    among the `others` (where, name), by turns; a file of tensors is left half written. Gives the names of the calls, as
    they come.
    """

    def install(
        patch: pytest.MonkeyPatch, note: Path, die_at: int | None, others: Sequence[tuple[object, str]] = ()
    ) -> list[str]:
        calls: list[str] = []
        number = itertools.count(1)  # in one step, since the thread that saves calls as well
        for where, name in (*_PLACES, *others):
            original = getattr(where, name)

            def wrapped(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
                calls.append(name)
                mine = next(number)
                if mine == die_at and (mine % 2 or name == "save_file"):
                    if name == "save_file":
                        Path(args[1]).write_bytes(b"\x40\0\0\0\0\0\0\0{")
                    os.kill(os.getpid(), signal.SIGKILL)
                try:
                    result = original(*args, **kwargs)
                    if name == "rename" and (announced := re.fullmatch(r"step-(\d+)", Path(args[1]).name)):
                        with note.open("a", encoding="utf-8") as file:
                            file.write(f"{announced[1]}\n")
                    return result
                finally:  # also where it raises, as the removal of what is not there does
                    if mine == die_at:
                        os.kill(os.getpid(), signal.SIGKILL)

            patch.setattr(where, name, wrapped)
        return calls

    return install


@pytest.fixture(scope="session")
def newest_step() -> Callable[[Path, Path, int], int]:
    """`newest_step(run, note, before)`: the newest checkpoint's step; fails if it or one that was announced is lost."""

    def read(run: Path, note: Path, before: int) -> int:
        found = load_newest(run / "checkpoints", lambda line: pytest.fail(f"a kill damaged a checkpoint: {line}"))
        now = found.step if found else 0
        announced = [int(line) for line in note.read_text(encoding="utf-8").split()] if note.exists() else []
        assert now >= max([before, *announced]), "an announced checkpoint is lost"
        return now

    return read
