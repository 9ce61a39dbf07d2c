"""Mirrors of the metrics: they say what the file says, also after going back, and cost a run nothing when they fail."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from entasis.run.config import RunConfig
from entasis.run.folder import RunFolder
from entasis.train import loop, track
from entasis.train.interrupt import Interrupted
from entasis.train.loop import train

MakeConfig = Callable[..., RunConfig]
Outcome = Any
Said = tuple[Console, Callable[[], str]]
_WANDB = {"track.wandb": {"project": "shapes", "mode": "offline"}}


class _Run:
    """What wandb.init gives."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def log(self, numbers: dict[str, float], step: int) -> None:
        assert not self.logged or step > self.logged[-1][0], "a step that does not rise is dropped"
        json.dumps(numbers, allow_nan=False)
        self.logged.append((step, numbers))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[_Run]:
    """The runs that a module of wandb's interface was asked for."""
    made: list[_Run] = []

    def init(**settings: Any) -> _Run:
        made.append(_Run(**settings))
        return made[-1]

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return made


@pytest.fixture
def said(tmp_path: Path) -> Said:
    console = Console(record=True, width=2000, file=(tmp_path / "said").open("w", encoding="utf-8"))
    return console, lambda: console.export_text(clear=False)


def _file(config: RunConfig) -> list[tuple[int, dict[str, float]]]:
    """The records of metrics.jsonl that count."""
    return [
        (record["step"], {name: value for name, value in record.items() if name != "step"})
        for record in RunFolder(Path(config.out)).read_metrics()
    ]


def _stop_after(monkeypatch: pytest.MonkeyPatch, step: int, config: RunConfig, console: Console) -> None:
    rate = vars(loop)["learning_rate"]

    def stop(config: RunConfig, at: int) -> Any:
        if at + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return rate(config, at)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "learning_rate", stop)
        with pytest.raises(Interrupted):
            train(config, console)


def test_without_being_asked_there_is_no_mirror(make_config: MakeConfig, quiet: Console, runs: list[_Run]) -> None:
    config = make_config({"train.steps": 2})
    before = threading.active_count()
    train(config, quiet)
    assert not runs
    assert not (Path(config.out) / "tensorboard").exists()
    assert threading.active_count() == before


def test_wandb_gets_every_record(make_config: MakeConfig, quiet: Console, runs: list[_Run]) -> None:
    config = make_config(_WANDB)
    train(config, quiet)
    (run,) = runs
    assert run.finished
    assert run.logged == _file(config)
    assert [step for step, _ in run.logged] == list(range(1, 13))
    assert run.settings["project"] == "shapes"
    assert run.settings["mode"] == "offline"
    assert run.settings["dir"] == config.out
    assert run.settings["config"]["train"]["steps"] == 12
    json.dumps(run.settings["config"])


def test_each_start_mirrors_what_counts(
    make_config: MakeConfig,
    quiet: Console,
    runs: list[_Run],
    in_child: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a kill the file has steps that the run goes back behind; no mirror may have them twice or lose any."""
    config = make_config(_WANDB)
    _stop_after(monkeypatch, 4, config, quiet)
    assert [step for step, _ in runs[0].logged] == [1, 2, 3, 4]
    assert runs[0].finished

    def killed() -> None:
        append = RunFolder.append_metrics

        def die(self: RunFolder, record: Any) -> None:
            append(self, record)
            if record["step"] == 8:  # the checkpoint is of step 6
                os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(RunFolder, "append_metrics", die)
        train(config, quiet)

    assert in_child(killed) == -signal.SIGKILL
    train(config, quiet)
    assert runs[-1].logged == _file(config)
    assert [step for step, _ in runs[-1].logged] == list(range(1, 13))


def test_tensorboard_gets_every_record_also_after_going_back(
    make_config: MakeConfig, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = make_config({"track.tensorboard": True})
    _stop_after(monkeypatch, 5, config, quiet)
    train(config, quiet)
    events = EventAccumulator(str(Path(config.out) / "tensorboard"))
    events.Reload()
    records = _file(config)
    assert set(events.Tags()["scalars"]) == {name for _, record in records for name in record}
    for name in events.Tags()["scalars"]:
        shown = [(event.step, event.value) for event in events.Scalars(name)]
        expected = [(step, record[name]) for step, record in records if name in record]
        assert [step for step, _ in shown] == [step for step, _ in expected]
        assert [value for _, value in shown] == pytest.approx([value for _, value in expected], rel=1e-6)


def _assert_one_warning(said: Said, config: RunConfig, *parts: str) -> None:
    log = RunFolder(Path(config.out)).log_file.read_text(encoding="utf-8")
    for text in (said[1](), log):
        lines = [line for line in text.splitlines() if "switched off" in line]
        assert len(lines) == 1, text
        for part in (*parts, "metrics.jsonl has every record"):
            assert part in lines[0]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_one_line(
    name: str, make_config: MakeConfig, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (name, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    config = make_config({"track.tensorboard": True} if name == "tensorboard" else _WANDB)
    train(config, said[0])
    _assert_one_warning(said, config, f"track.{name}: ", "pip install 'entasis[track]'")
    assert len(_file(config)) == 12


@pytest.mark.parametrize("when", ["init", "log", "finish"])
def test_a_tracker_that_raises_is_switched_off_once(
    when: str,
    make_config: MakeConfig,
    quiet: Console,
    said: Said,
    runs: list[_Run],
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Callable[[Outcome, Outcome], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def dead(*_: Any, **__: Any) -> None:
        raise ConnectionError("the network\nis gone")

    train(make_config(out=tmp_path / "whole"), quiet)
    monkeypatch.setattr(sys.modules["wandb"] if when == "init" else _Run, when, dead)
    config = make_config(_WANDB)
    train(config, said[0])
    _assert_one_warning(said, config, "track.wandb: ConnectionError: the network is gone")
    assert_same_bits(outcome(Path(config.out)), outcome(tmp_path / "whole"))


@pytest.mark.parametrize("when", ["init", "log", "finish"])
def test_a_tracker_that_hangs_takes_no_time(
    when: str, make_config: MakeConfig, said: Said, runs: list[_Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def hang(*_: Any, **__: Any) -> None:
        release.wait(60)
        raise ConnectionError

    monkeypatch.setattr(sys.modules["wandb"] if when == "init" else _Run, when, hang)
    monkeypatch.setattr(track, "_LAST_WAIT_SECONDS", 0.1)
    config = make_config(_WANDB)
    started = time.monotonic()
    train(config, said[0])
    assert time.monotonic() - started < 30
    release.set()
    _assert_one_warning(said, config, "track.wandb: not done 0.1 seconds after the last step")


def test_a_tracker_that_falls_behind_is_switched_off(
    make_config: MakeConfig, said: Said, runs: list[_Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(_Run, "log", lambda *_, **__: release.wait(60))
    monkeypatch.setattr(track, "_LONGEST_QUEUE", 3)
    config = make_config(_WANDB)
    train(config, said[0])
    release.set()
    _assert_one_warning(said, config, "track.wandb: falls behind by 3 steps")


def test_mirrors_may_change_when_a_run_goes_on(make_config: MakeConfig, said: Said, runs: list[_Run]) -> None:
    train(make_config({"train.steps": 2}), said[0])
    train(make_config({"train.steps": 3, **_WANDB}), said[0])
    assert [step for step, _ in runs[0].logged] == [1, 2, 3], "begun late, and with what was before"
    assert "changed since the run began: track.wandb" in said[1]()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_the_true_wandb_offline(make_config: MakeConfig, said: Said) -> None:
    config = make_config(_WANDB)
    train(config, said[0])
    assert "switched off" not in said[1]()
    assert list((Path(config.out) / "wandb").glob("offline-run-*"))
