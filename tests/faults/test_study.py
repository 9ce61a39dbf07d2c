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

_KILLS = 30
_TIMES = {"tokens_per_second", "command", "environment"}
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


def _finished(study: Path, steps: int) -> dict[Path, bytes]:
    """The metrics of every run that is done, by folder."""
    done = {}
    for file in study.glob("*/*/metrics.jsonl"):
        records = RunFolder(file.parent).read_metrics()
        if records and records[-1]["step"] == steps and (file.parent / f"checkpoints/step-{steps:08d}").exists():
            done[file.parent] = file.read_bytes()
    return done


def _size(study: Path) -> int:
    return sum(file.stat().st_size for file in study.glob("*/*/metrics.jsonl"))


@pytest.mark.slow
def test_a_study_with_two_workers_killed_thirty_times(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    steps = 220
    changes = {
        "shape": {"family": "uniform", "layers": 2, "width": 16, "heads": 4},
        "train.steps": steps,
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
    assert _start(files["whole"]).wait(timeout=300) == 0

    study, source = tmp_path / "killed", random.Random(17)
    kills, workers_killed, done = 0, 0, dict[Path, bytes]()
    while kills < _KILLS:
        size = _size(study)
        process = _start(files["killed"])
        # Now and then while it starts; else some time after a worker took a new step, which may end a run.
        limit = time.monotonic() + (source.uniform(0, 5) if kills % 6 == 0 else 60)
        while process.poll() is None and _size(study) == size and time.monotonic() < limit:
            time.sleep(0.01)
        time.sleep(source.uniform(0, 0.6))
        if process.poll() is not None:
            assert process.returncode == 0, process.communicate()
            break
        owners = [int(lock.read_text() or 0) for lock in study.glob("*/*/.lock") if not _free(lock)]
        if kills % 3 == 2 and owners:  # a worker, which the study then says
            os.kill(source.choice(owners), signal.SIGKILL)
            _, errors = process.communicate(timeout=60)
            assert process.returncode in (0, 1)
            workers_killed += process.returncode
            if process.returncode:
                assert b"its worker process ended (exit status -9" in errors.splitlines()[-1]
        else:
            process.kill()
            process.communicate()
        kills += 1
        while not all(map(_free, study.glob("**/.lock"))):  # the workers notice, and leave
            time.sleep(0.01)
        for run, metrics in done.items():
            assert (run / "metrics.jsonl").read_bytes() == metrics, f"{run.name} was finished, and trained again"
        done = _finished(study, steps)
    assert kills == _KILLS, f"the study was over after {kills} kills"
    assert workers_killed >= 3
    assert len(done) >= 2, "no run was finished between the kills"
    finish = _start(files["killed"])
    assert finish.wait(timeout=300) == 0
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
