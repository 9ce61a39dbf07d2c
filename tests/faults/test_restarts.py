"""Going back to the newest good checkpoint by itself, and leaving out steps that are bad every time."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from entasis.cli.main import run_command
from entasis.data.dataset import TokenSplit
from entasis.errors import EntasisError, StorageError
from entasis.run.checkpoint import NonFiniteError
from entasis.run.config import RunConfig
from entasis.run.folder import RunFolder
from entasis.train import loop
from entasis.train.interrupt import Interrupted
from entasis.train.loop import train
from entasis.train.parallel import SpreadModel
from entasis.train.restart import train_with_restarts

MakeConfig = Callable[..., RunConfig]
Outcome = Any
Same = Callable[[Outcome, Outcome], None]
Said = tuple[Console, Callable[[], str]]


@pytest.fixture
def said(tmp_path: Path) -> Said:
    """A console, and what it showed."""
    console = Console(record=True, width=2000, file=(tmp_path / "said").open("w", encoding="utf-8"))
    return console, lambda: console.export_text(clear=False)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waits nowhere; the seconds that would have been waited."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


def _whole(make_config: MakeConfig, quiet: Console, tmp_path: Path, outcome: Callable[[Path], Outcome]) -> Outcome:
    train(make_config(out=tmp_path / "whole"), quiet)
    return outcome(tmp_path / "whole")


def _spoil(monkeypatch: pytest.MonkeyPatch, bad: Callable[[int, int], bool]) -> list[int]:
    """Makes the loss NaN where `bad(step from 1, how often it was met)` says so; the steps that were begun."""
    begun: list[int] = []
    rate, loss_of_pass = vars(loop)["learning_rate"], SpreadModel.loss_of_pass

    def begin(config: RunConfig, step: int) -> float:
        begun.append(step + 1)
        result: float = rate(config, step)
        return result

    def spoilt(self: SpreadModel, *args: Any) -> Any:
        loss, routings = loss_of_pass(self, *args)
        return loss * float("nan") if bad(begun[-1], begun.count(begun[-1])) else loss, routings

    monkeypatch.setattr(loop, "learning_rate", begin)
    monkeypatch.setattr(SpreadModel, "loss_of_pass", spoilt)
    return begun


def test_a_loss_that_was_not_finite_once(
    make_config: MakeConfig,
    quiet: Console,
    said: Said,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Same,
    pauses: list[float],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    whole = _whole(make_config, quiet, tmp_path, outcome)
    config = make_config()
    begun = _spoil(monkeypatch, lambda step, times: step in (2, 8) and times == 1)
    train_with_restarts(config, said[0], max_restarts=2)
    assert begun == [1, 2, 1, 2, 3, 4, 5, 6, 7, 8, 7, 8, 9, 10, 11, 12]
    assert pauses == [0, 0]
    assert_same_bits(outcome(Path(config.out)), whole)
    log = RunFolder(Path(config.out)).log_file.read_text(encoding="utf-8")
    for text in (said[1](), log):
        lines = [line for line in text.splitlines() if "starts again" in line]
        assert len(lines) == 2
        assert "starts again (1 of at most 2) after: step 2: loss nan" in lines[0]
        assert "starts again (2 of at most 2) after: step 8: loss nan" in lines[1]


def test_no_more_often_than_asked(
    make_config: MakeConfig, quiet: Console, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = _spoil(monkeypatch, lambda step, _: step == 2 + begun.count(1))  # another step each time
    with pytest.raises(NonFiniteError, match=r"^step \d: loss nan"):
        train_with_restarts(make_config({"train.checkpoint_every": 50}), quiet, max_restarts=1)
    assert begun.count(1) == 2
    with pytest.raises(NonFiniteError):
        train_with_restarts(make_config(), quiet, max_restarts=0)


def test_a_bad_batch_is_bad_again_and_stops_at_once(
    make_config: MakeConfig, said: Said, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = _spoil(monkeypatch, lambda step, _: step == 5)
    with pytest.raises(NonFiniteError) as caught:
        train_with_restarts(make_config(), said[0], max_restarts=9)
    assert begun == [1, 2, 3, 4, 5, 4, 5], "restarts are burnt"
    line = str(caught.value)
    assert line.startswith("step 5: loss nan")
    for part in (
        "windows ",
        ".npy at token ",
        "came again in the same way",
        "train.skip_bad_steps=1 leaves such a step",
    ):
        assert part in line
    assert "\n" not in line
    assert said[1]().count("starts again") == 1


def test_bad_steps_are_left_out_counted_and_the_same_after_a_stop(
    make_config: MakeConfig,
    quiet: Console,
    said: Said,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Same,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    changes = {"train.skip_bad_steps": 2}
    begun = _spoil(monkeypatch, lambda step, _: step in (4, 8))
    config = make_config(changes)
    train(config, said[0])
    whole = outcome(Path(config.out))
    assert whole.state["skipped"] == [4, 8]
    assert [record["step"] for record in whole.metrics] == list(range(1, 13)), "a step that was left out counts"
    left_out = [record for record in whole.metrics if record.get("skipped")]
    assert [record["step"] for record in left_out] == [4, 8]
    assert all(record.keys() & {"train_loss", "grad_norm"} == set() for record in left_out)
    assert "val_loss" in left_out[0], "evaluated as usual"
    text = said[1]()
    assert "step 4: loss nan" in text
    assert "left out, 2 of at most 2 (train.skip_bad_steps)" in text
    assert "after 12 steps (2 left out)" in text
    assert "nan" not in RunFolder(Path(config.out)).metrics_file.read_text(encoding="utf-8").lower()

    stopped = make_config(changes, out=tmp_path / "stopped")
    for stop in (4, 6, 9):
        begun.clear()
        with monkeypatch.context() as patch:
            rate = vars(loop)["learning_rate"]

            def signal_there(config: RunConfig, step: int, stop: int = stop, rate: Any = rate) -> float:
                if step + 1 == stop:
                    os.kill(os.getpid(), signal.SIGTERM)
                result: float = rate(config, step)
                return result

            patch.setattr(loop, "learning_rate", signal_there)
            with pytest.raises(Interrupted, match=f"step {stop} of 12"):
                train(stopped, quiet)
    train(stopped, quiet)
    assert_same_bits(outcome(tmp_path / "stopped"), whole)


def test_one_bad_step_more_than_may_be_left_out(
    make_config: MakeConfig, quiet: Console, outcome: Callable[[Path], Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also across a stop: what was left out before counts. And the number may be raised on the way."""
    _spoil(monkeypatch, lambda step, _: step in (2, 7))
    config = make_config({"train.skip_bad_steps": 1})
    for _ in range(2):
        with pytest.raises(NonFiniteError, match=r"^step 7: .*1 steps are left out already"):
            train(config, quiet)
    assert outcome(Path(config.out)).step == 6
    train(make_config({"train.skip_bad_steps": 2}), quiet)
    assert outcome(Path(config.out)).state["skipped"] == [2, 7]


def _failing(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, number: int, fails: Callable[[int], bool]
) -> list[int]:
    original, calls = getattr(where, name), [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if fails(calls[0]):
            raise OSError(number, os.strerror(number), "some file")
        return original(*args, **kwargs)

    monkeypatch.setattr(where, name, failing)
    return calls


@pytest.mark.parametrize(
    ("where", "name", "number", "at"),
    [
        (TokenSplit, "window", errno.EIO, 30),
        (TokenSplit, "window", errno.ESTALE, 7),
        (os, "rename", errno.ENOSPC, 3),
        (RunFolder, "append_metrics", errno.ENOSPC, 8),
    ],
)
def test_a_disk_that_refuses_once(
    where: Any,
    name: str,
    number: int,
    at: int,
    make_config: MakeConfig,
    quiet: Console,
    said: Said,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Same,
    pauses: list[float],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    whole = _whole(make_config, quiet, tmp_path, outcome)
    config = make_config()
    with monkeypatch.context() as patch:
        _failing(patch, where, name, number, lambda call: call == at)
        train_with_restarts(config, said[0], max_restarts=3)
    assert pauses == [1], "it waits before it tries again"
    assert "starts again (1 of at most 3) after: " in said[1]()
    assert os.strerror(number) in said[1]()
    assert_same_bits(outcome(Path(config.out)), whole)


def test_a_disk_that_refuses_for_good(
    make_config: MakeConfig, quiet: Console, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        _failing(patch, os, "rename", errno.ENOSPC, lambda _: True)
        with pytest.raises(StorageError, match="No space left"):
            train_with_restarts(make_config(), quiet, max_restarts=3)
    assert pauses == [1, 2, 4]
    with monkeypatch.context() as patch:
        _failing(patch, TokenSplit, "window", errno.ENOENT, lambda _: True)
        with pytest.raises(FileNotFoundError):
            train_with_restarts(make_config(), quiet, max_restarts=3)
    assert pauses == [1, 2, 4], "a missing file stays missing"


def test_other_failures_are_not_tried_again(
    make_config: MakeConfig, quiet: Console, pauses: list[float], other_data: Path
) -> None:
    train(make_config({"train.steps": 3}), quiet)
    with pytest.raises(EntasisError, match="other data"):
        train_with_restarts(make_config({"data.path": str(other_data)}), quiet, max_restarts=3)
    assert pauses == []


def test_the_option_of_the_command(
    make_config: MakeConfig,
    pauses: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    _spoil(monkeypatch, lambda step, times: step == 5 and times == 1)
    file = tmp_path / "c.yaml"
    file.write_text(make_config().to_yaml(), encoding="utf-8")
    assert run_command(["train", str(file)]) == 1
    monkeypatch.undo()
    _spoil(monkeypatch, lambda step, times: step == 5 and times == 1)
    assert run_command(["train", str(file), "--max-restarts", "1"]) == 0
    assert "train: starts again (1 of at most 1) after: step 5" in capsys.readouterr().out
    assert run_command(["train", str(file), "--max-restarts", "-1"]) == 2
    assert "--max-restarts" in capsys.readouterr().err
