"""A comparison with two workers, killed again and again: no finished run repeats, and the results are the same."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entasis.run.config import RunConfig
from entasis.run.folder import RunFolder

_KILLS, _AT_THE_START = 30, 5
"""In all, and those of them that come while the command starts."""
_STEPS, _RUNS = 160, 8
_TIMES = {"created", "tokens_per_second", "tokens_per_second_ratio", "command", "environment"}
"""What results.json says of the machine and of the clock."""


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(inner) for key, inner in value.items() if key not in _TIMES}
    return [_without_times(inner) for inner in value] if isinstance(value, list) else value


def _start(file: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "entasis", "compare", str(file), "--workers", "2"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def _free(lock: Path) -> bool:
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _finished(study: Path) -> dict[Path, bytes]:
    """The metrics of every run that is done, by folder."""
    done = {}
    for file in study.glob("*/*/metrics.jsonl"):
        records = RunFolder(file.parent).read_metrics()
        if records and records[-1]["step"] == _STEPS and (file.parent / f"checkpoints/step-{_STEPS:08d}").exists():
            done[file.parent] = file.read_bytes()
    return done


def _saved(study: Path) -> int:
    """Steps of all runs that are saved, which no kill takes back."""
    newest: dict[Path, int] = {}
    for folder in study.glob("*/*/checkpoints/step-*"):
        newest[folder.parent] = max(newest.get(folder.parent, 0), int(folder.name.removeprefix("step-")))
    return sum(newest.values())


def _reached(study: Path, steps: int, process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Waits until so many steps are saved; False if the command ended first, or the seconds were over."""
    limit = time.monotonic() + seconds
    while _saved(study) < steps:
        if process.poll() is not None or time.monotonic() >= limit:
            return False
        time.sleep(0.003)
    return True


def _leave(study: Path) -> None:
    """Waits until no worker holds a run."""
    limit = time.monotonic() + 60
    while not all(map(_free, study.glob("**/.lock"))):
        assert time.monotonic() < limit, "the command is gone, and its workers stay"
        time.sleep(0.01)


def _plan(source: random.Random) -> list[int | None]:
    """For each kill how many steps are saved before it, at random; None: while the command starts.

    The last waits for 3.5 runs' worth of steps. Two workers have no more than two runs begun and not finished, so that
    at least two are finished by then, on a machine of any speed; and more than half of the work is still left.
    """
    last = 7 * _STEPS // 2
    marks = [*sorted(source.sample(range(1, last), _KILLS - _AT_THE_START - 1)), last]
    plan: list[int | None] = []
    while len(plan) < _KILLS:
        plan.append(None if len(plan) % 6 == 0 else marks.pop(0))
    return plan


@pytest.mark.slow
def test_a_study_with_two_workers_killed_thirty_times(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    changes = {
        "shape": {"family": "uniform", "layers": 2, "width": 16, "heads": 4},
        "train.steps": _STEPS,
        "train.checkpoint_every": 1,
        "train.evaluate_every": 20,
        "compare": {
            "shapes": {"uniform": {}, "prism": {"family": "prism", "heads": [2, 4]}},
            "seeds": [0, 1],
            "tune": {"learning_rate": [1e-3, 3e-3], "seed": 7},
        },
    }
    files = {}
    for name in ("whole", "killed"):
        files[name] = tmp_path / f"{name}.yaml"
        files[name].write_text(make_config(changes, out=tmp_path / name).to_yaml(), encoding="utf-8")
    begun = time.monotonic()
    process = _start(files["whole"])
    assert _reached(tmp_path / "whole", 1, process, seconds=120)
    start_seconds = time.monotonic() - begun
    assert process.wait(timeout=600) == 0
    assert _saved(tmp_path / "whole") == _RUNS * _STEPS
    step_seconds = (time.monotonic() - begun - start_seconds) / (_RUNS * _STEPS)

    study, source = tmp_path / "killed", random.Random(17)
    workers_killed, done = 0, dict[Path, bytes]()
    for kill, mark in enumerate(_plan(source)):
        before = _saved(study)
        process = _start(files["killed"])
        if mark is None:
            _reached(study, before + 1, process, seconds=source.uniform(0, 1) * start_seconds)
        else:
            wanted = max(mark, before + 1)  # where the kill before came late: at the first new step
            assert _reached(study, wanted, process, seconds=300), f"{_saved(study)} steps saved instead of {wanted}"
            time.sleep(source.uniform(0, 4) * step_seconds)  # anywhere in what follows a save
        assert process.poll() is None, f"the study was over before kill {kill}: {process.communicate()}"
        owners = [int(lock.read_text() or 0) for lock in study.glob("*/*/.lock") if not _free(lock)]
        if kill % 3 == 2 and owners:  # a worker, which the study then says
            os.kill(source.choice(owners), signal.SIGKILL)
            _, errors = process.communicate(timeout=60)
            assert process.returncode in (0, 1)
            workers_killed += process.returncode
            if process.returncode:
                assert b"its worker process ended (exit status -9" in errors.splitlines()[-1]
        else:
            process.kill()
            process.communicate()
        _leave(study)
        assert _saved(study) >= max(before, mark or 0), "a checkpoint is lost"
        for run, metrics in done.items():
            assert (run / "metrics.jsonl").read_bytes() == metrics, f"{run.name} was finished, and trained again"
        done = _finished(study)
    assert workers_killed >= 3
    assert len(done) >= 2, "no run was finished between the kills"
    finish = _start(files["killed"])
    assert finish.wait(timeout=600) == 0
    for run, metrics in done.items():
        assert (run / "metrics.jsonl").read_bytes() == metrics, f"{run.name} was finished, and trained again"
    results = [
        _without_times(json.loads((tmp_path / name / "results.json").read_text(encoding="utf-8")))
        for name in ("whole", "killed")
    ]
    for each in results:
        each.pop("config", None)
    assert results[0] == results[1]
    assert len(json.dumps(results[0])) > 2000, "nothing to compare"
