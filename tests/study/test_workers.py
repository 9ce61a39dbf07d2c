"""Several runs at once: the same study as one after the other, and nothing left behind when it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from entasis.errors import ConfigError, EntasisError
from entasis.report.schema import Comparison
from entasis.run.checkpoint import NonFiniteError
from entasis.run.config import RunConfig, parse_config
from entasis.study.compare import compare
from entasis.study.workers import Job, _Worker, train_jobs

MakeStudy = Callable[..., RunConfig]


@pytest.fixture
def study(settings: dict[str, Any], tmp_path: Path) -> MakeStudy:
    """Makes a study of two shapes and two seeds."""

    def make(name: str = "study", **train: Any) -> RunConfig:
        return parse_config(
            {
                **settings,
                "shape": {"family": "uniform", "layers": 2, "width": 16, "heads": 4},
                "train": {**settings["train"], "steps": 4, "evaluate_every": 2, "threads": 1, **train},
                "out": str(tmp_path / name),
                "compare": {
                    "shapes": {"uniform": {}, "prism": {"family": "prism", "heads": [2, 4]}},
                    "seeds": [0, 1],
                    "tune": {"learning_rate": [1e-3, 1e37], "seed": 7},
                },
            }
        )

    return make


def _jobs(config: RunConfig, **optimizer: Any) -> list[Job]:
    base = config.model_copy(update={"compare": None})
    return [
        Job(
            base.model_copy(
                update={
                    "out": f"{config.out}/runs/{seed}",
                    "train": config.train.model_copy(update={"seed": seed}),
                    "optimizer": config.optimizer.model_copy(update=optimizer),
                }
            ),
            f"seed {seed}",
        )
        for seed in range(3)
    ]


def _losses(results: Comparison) -> Any:
    return {
        name: ([run["curve"] for run in shape["runs"]], shape["tuning"], shape["difference"])
        for name, shape in results["shapes"].items()
    }


def test_two_workers_find_what_one_finds(study: MakeStudy) -> None:
    quiet = Console(quiet=True)
    alone = compare(study("alone"), quiet, command="c")
    together = compare(study("together"), quiet, command="c", workers=2)
    assert _losses(together) == _losses(alone)
    assert (alone["workers"], together["workers"]) == (1, 2)
    assert together["shapes"]["uniform"]["tuning"][1]["final_val_loss"] is None, "a rate of 1e37 diverges"
    saved = json.loads(Path(study("together").out, "results.json").read_text())
    assert saved["shapes"] == together["shapes"]


def test_a_divergence_is_handed_to_the_caller_with_the_name_of_the_run(study: MakeStudy) -> None:
    jobs = _jobs(study(), learning_rate=1e37)
    for workers in (1, 2):
        ended = dict(train_jobs(jobs, Console(quiet=True), workers=workers))
        assert sorted(ended) == [0, 1, 2]
        for number, error in ended.items():
            assert isinstance(error, NonFiniteError)
            assert str(error).startswith(f"seed {number}: step")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_of_another_protocol_is_refused(study: MakeStudy, workers: int) -> None:
    list(train_jobs(_jobs(study())[:1], Console(quiet=True)))
    with pytest.raises(ConfigError, match=r"^train\.evaluate_every: the study has a run with 2 .*, and now it is 4"):
        list(train_jobs(_jobs(study(evaluate_every=4)), Console(quiet=True), workers=workers))


def test_a_worker_that_is_killed_is_told_in_one_line(study: MakeStudy, monkeypatch: pytest.MonkeyPatch) -> None:
    give = _Worker.give

    def give_and_kill(self: _Worker, number: int, job: Job) -> None:
        give(self, number, job)
        assert self.process.pid
        os.kill(self.process.pid, signal.SIGKILL)

    monkeypatch.setattr(_Worker, "give", give_and_kill)
    with pytest.raises(
        EntasisError, match=r"^seed \d: its worker process ended \(exit status -9; .*finished runs are kept"
    ):
        list(train_jobs(_jobs(study()), Console(quiet=True), workers=2))


@pytest.fixture
def begun(study: MakeStudy, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A long study with two workers, both of which have taken a step."""
    config = study("long", steps=100_000, checkpoint_every=50_000, evaluate_every=100_000)
    file = tmp_path / "study.yaml"
    file.write_text(config.model_copy(update={"compare": config.compare.model_copy(update={"tune": None})}).to_yaml())  # type: ignore[union-attr]
    process = subprocess.Popen(
        [sys.executable, "-m", "entasis", "compare", str(file), "--workers", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    runs = Path(config.out) / "runs"
    try:
        deadline = time.monotonic() + 120
        while len(list(runs.glob("*/metrics.jsonl"))) < 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process, runs
    finally:
        process.kill()
        process.communicate()


def _locked(run: Path) -> bool:
    """Whether a process works in a run folder."""
    import fcntl

    with (run / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _assert_saved(runs: Path) -> None:
    for run in runs.iterdir():
        assert list((run / "checkpoints").glob("step-*")), "not saved"
        assert not _locked(run)


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 75),
        pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 75, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_signal_saves_every_run(
    begun: tuple[subprocess.Popen[str], Path], number: signal.Signals, status: int
) -> None:
    process, runs = begun
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert (
        errors.splitlines()[-1]
        == f"error: stopped by {number.name}: every run is saved; the same command goes on from there"
    )
    _assert_saved(runs)


@pytest.mark.parametrize(
    ("number", "study_first"),
    [
        (signal.SIGTERM, True),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, False, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_every_process_saves_every_run(
    begun: tuple[subprocess.Popen[str], Path], number: signal.Signals, study_first: bool
) -> None:
    """As schedulers send it: the workers get it from outside, and then from the study once more."""
    process, runs = begun
    owners = [int((run / ".lock").read_text(encoding="utf-8")) for run in runs.iterdir()]
    assert process.pid not in owners
    for owner in [process.pid, *owners] if study_first else [*owners, process.pid]:
        os.kill(owner, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert errors.splitlines()[-1].startswith("error: ")
    assert f"stopped by {number.name}" in errors.splitlines()[-1]
    _assert_saved(runs)


def test_workers_do_not_outlive_a_killed_study(begun: tuple[subprocess.Popen[str], Path]) -> None:
    process, runs = begun
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while any(_locked(run) for run in runs.iterdir()):
        assert time.monotonic() < deadline, "a worker goes on without its study"
        time.sleep(0.05)
