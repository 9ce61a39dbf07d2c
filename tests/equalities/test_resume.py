"""A run that was stopped and started again ends with the same bits as one that never stopped, wherever it stopped."""

from __future__ import annotations

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
from rich.console import Console

from entasis.run.config import RunConfig, parse_config
from entasis.run.folder import RunFolder
from entasis.train import loop
from entasis.train.interrupt import Interrupted
from entasis.train.loop import train
from entasis.train.parallel import SpreadModel

MakeConfig = Callable[..., RunConfig]
Outcome = Any
InChild = Callable[..., int]


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.fixture(scope="module")
def whole(
    settings: dict[str, Any],
    quiet: Console,
    outcome: Callable[[Path], Outcome],
    tmp_path_factory: pytest.TempPathFactory,
) -> Outcome:
    """What the run leaves when nothing stops it: 12 steps, 2.4 epochs."""
    path = tmp_path_factory.mktemp("whole")
    train(parse_config({**settings, "out": str(path)}), quiet)
    return outcome(path)


def _at_each_call(monkeypatch: pytest.MonkeyPatch, where: object, name: str, action: Callable[[int], None]) -> None:
    """Calls `action` with the number of the call (from 1) before each call of a function."""
    original = getattr(where, name)
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        action(calls)
        return original(*args, **kwargs)

    monkeypatch.setattr(where, name, wrapped)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_at_every_step(
    number: signal.Signals,
    make_config: MakeConfig,
    quiet: Console,
    whole: Outcome,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Callable[[Outcome, Outcome], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twelve processes in a row, each stopped in its first step: at epochs' ends (5, 10), on and off saved steps."""
    config = make_config()
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    for step in range(1, 12):
        with monkeypatch.context() as patch:
            _at_each_call(
                patch, loop, "learning_rate", lambda call: os.kill(os.getpid(), number) if call == 1 else None
            )
            with pytest.raises(Interrupted, match=rf"{number.name}: step {step} of 12 is saved in .*goes on"):
                train(config, quiet)
        assert outcome(Path(config.out)).step == step
    train(config, quiet)
    assert_same_bits(outcome(Path(config.out)), whole)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == handlers


@pytest.mark.parametrize("stops", [range(1, 24), range(2, 24, 5), range(23, 24)], ids=["every", "some", "last"])
def test_stopped_in_mid_accumulation(
    stops: range,
    make_config: MakeConfig,
    quiet: Console,
    whole: Outcome,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Callable[[Outcome, Outcome], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An exception in the n-th pass of the run, for rising n; also before there is any checkpoint."""
    config = make_config({"train.checkpoint_every": 2})

    for stop in stops:
        passes_done = 2 * max(map(_step, Path(config.out).glob("checkpoints/step-*")), default=0)

        def fail(call: int, stop: int = stop, done: int = passes_done) -> None:
            if done + call == stop:
                raise Killed

        with monkeypatch.context() as patch:
            _at_each_call(patch, SpreadModel, "loss_of_pass", fail)
            with pytest.raises(Killed):
                train(config, quiet)
    train(config, quiet)
    assert_same_bits(outcome(Path(config.out)), whole)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


@pytest.mark.parametrize("stop", [5, 10])
@pytest.mark.parametrize("sequences", [4, 6])
def test_checkpoint_exactly_at_an_epoch_boundary_and_inside_one(
    stop: int,
    sequences: int,
    make_config: MakeConfig,
    quiet: Console,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Callable[[Outcome, Outcome], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Of 20 windows, 4 sequences end an epoch with a step; 6 end it inside a step, and inside a micro-batch of 3."""
    changes = {"train.batch_tokens": 16 * sequences, "train.micro_batch": sequences // 2}
    train(make_config(changes, out=tmp_path / "never stopped"), quiet)
    config = make_config(changes)

    def stop_there(call: int) -> None:
        if call == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        _at_each_call(patch, loop, "learning_rate", stop_there)
        with pytest.raises(Interrupted, match=f"step {stop} of 12"):
            train(config, quiet)
    train(config, quiet)
    after = outcome(Path(config.out))
    assert after.step == 12
    assert after.state["tokens"] == 12 * 16 * sequences
    assert_same_bits(after, outcome(tmp_path / "never stopped"))


@pytest.mark.parametrize(
    "changes",
    [
        {"model.style": "gpt2"},
        {"data.document_mask": True},
        {"train.precision": "bf16", "shape": {"family": "uniform", "layers": 2, "width": 16, "heads": 2}},
        {"schedule": {"name": "wsd", "warmup_steps": 2, "decay_steps": 4}, "optimizer.clip": None},
    ],
    ids=["gpt2", "document_mask", "bf16", "wsd without clipping"],
)
def test_other_settings_resume_as_well(
    changes: dict[str, Any],
    make_config: MakeConfig,
    quiet: Console,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Callable[[Outcome, Outcome], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    train(make_config(changes, out=tmp_path / "never stopped"), quiet)
    config = make_config(changes)
    with monkeypatch.context() as patch:
        _at_each_call(
            patch, loop, "learning_rate", lambda call: os.kill(os.getpid(), signal.SIGTERM) if call == 7 else None
        )
        with pytest.raises(Interrupted):
            train(config, quiet)
    train(config, quiet)
    assert_same_bits(outcome(Path(config.out)), outcome(tmp_path / "never stopped"))


@pytest.mark.parametrize(("step", "newest"), [(3, set()), (8, {3, 6})])
def test_killed_before_the_first_checkpoint_and_between_two(
    step: int,
    newest: set[int],
    make_config: MakeConfig,
    quiet: Console,
    whole: Outcome,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Callable[[Outcome, Outcome], None],
    in_child: InChild,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Step 8 comes while step 6 is being saved, or when it is."""
    config = make_config()
    with monkeypatch.context() as patch:
        _at_each_call(
            patch, loop, "learning_rate", lambda call: os.kill(os.getpid(), signal.SIGKILL) if call == step else None
        )
        assert in_child(lambda: train(config, quiet)) == -signal.SIGKILL
    saved = set(map(_step, Path(config.out).glob("checkpoints/step-*")))
    assert saved <= newest
    assert bool(saved) == bool(newest)
    assert len(RunFolder(Path(config.out)).read_metrics()) == step - 1
    train(config, quiet)
    assert_same_bits(outcome(Path(config.out)), whole)


@pytest.mark.slow
def test_command_killed_at_twenty_random_moments(
    make_config: MakeConfig,
    quiet: Console,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Callable[[Outcome, Outcome], None],
    tmp_path: Path,
) -> None:
    """The command itself, killed from outside once its first new step is on disk, plus a random while."""
    changes = {"train.steps": 120, "train.checkpoint_every": 1, "train.evaluate_every": 2}
    train(make_config(changes, out=tmp_path / "never stopped"), quiet)
    config = make_config(changes)
    (tmp_path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    command = [sys.executable, "-m", "entasis", "train", str(tmp_path / "config.yaml")]
    delays, kills = random.Random(13), 0
    metrics = Path(config.out) / "metrics.jsonl"
    while kills < 20:
        size = metrics.stat().st_size if metrics.exists() else 0
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size > size):
            time.sleep(0.002)
        time.sleep(delays.uniform(0, 0.2))
        if process.poll() is not None:
            assert process.returncode == 0
            break
        process.kill()
        process.communicate()
        kills += 1
    assert kills == 20, f"the run was over after {kills} kills"
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "goes on after step" in done.stdout
    assert_same_bits(outcome(Path(config.out)), outcome(tmp_path / "never stopped"))


def test_going_on_with_a_finished_run_changes_nothing(
    make_config: MakeConfig,
    quiet: Console,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Callable[[Outcome, Outcome], None],
) -> None:
    config = make_config({"train.steps": 4})
    train(config, quiet)
    before = outcome(Path(config.out))
    times = {path: path.stat().st_mtime_ns for path in Path(config.out, "checkpoints").rglob("*")}
    train(config, quiet)
    assert_same_bits(before, outcome(Path(config.out)))
    assert {path: path.stat().st_mtime_ns for path in Path(config.out, "checkpoints").rglob("*")} == times
