"""Saving beside training: a copy of the moment, one at a time, failures told."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from entasis.errors import StorageError
from entasis.run.checkpoint import Checkpoint, NonFiniteError, load_newest
from entasis.run.config import RunConfig
from entasis.train import loop
from entasis.train import saver as module
from entasis.train.loop import train
from entasis.train.saver import Saver
from entasis.train.schedule import learning_rate


def _checkpoint(step: int, value: torch.Tensor) -> Checkpoint:
    state = {"tokens": step, "shape": {}, "block": {}, "data_fingerprint": "x"}
    return Checkpoint(step=step, model={"weight": value}, optimizer={"weight:moment": value}, state=state)


def _newest(folder: Path) -> Checkpoint:
    found = load_newest(folder, report=pytest.fail)
    assert found is not None
    return found


def test_what_is_saved_is_the_moment_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    original = vars(module)["save_checkpoint"]

    priorities = []

    def late(*args: Any) -> Any:
        assert go_on.wait(20)
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return original(*args)

    monkeypatch.setattr(module, "save_checkpoint", late)
    weight = torch.zeros(3)
    with Saver(tmp_path, keep=2) as saver:
        saver.save(_checkpoint(1, weight))
        weight += 1  # training goes on before a byte is written
        assert not list(tmp_path.glob("step-*"))
        go_on.set()
    assert sys.platform != "linux" or priorities == [19]
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19
    newest = _newest(tmp_path)
    assert newest.step == 1
    assert newest.model["weight"].tolist() == newest.optimizer["weight:moment"].tolist() == [0, 0, 0]


def test_one_is_written_at_a_time_and_all_are_there_at_the_end(tmp_path: Path) -> None:
    weight = torch.zeros(3)
    with Saver(tmp_path, keep=2) as saver:
        for step in range(1, 6):
            weight += 1
            saver.save(_checkpoint(step, weight))
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000004", "step-00000005"]
    assert _newest(tmp_path).model["weight"].tolist() == [5, 5, 5]


def test_a_failure_is_told_at_the_next_look_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise StorageError("no room")

    monkeypatch.setattr(module, "save_checkpoint", full)
    weight = torch.zeros(3)
    with pytest.raises(StorageError, match="no room"), Saver(tmp_path, keep=2) as saver:
        saver.save(_checkpoint(1, weight))
    saver = Saver(tmp_path, keep=2)
    saver.save(_checkpoint(1, weight))
    with pytest.raises(StorageError, match="no room"):
        saver.save(_checkpoint(2, weight))
    saver.wait()
    with pytest.raises(ZeroDivisionError), Saver(tmp_path, keep=2) as saver:
        saver.save(_checkpoint(3, weight))
        raise ZeroDivisionError  # what stops the run is told, and not what it brought about


def test_a_weight_that_is_not_finite_is_refused_at_once(tmp_path: Path) -> None:
    with Saver(tmp_path, keep=2) as saver, pytest.raises(NonFiniteError, match=r"^step 1: weight weight"):
        saver.save(_checkpoint(1, torch.tensor([float("nan")])))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("strategy", [{"strategy": "fsdp"}, {"strategy": "hybrid", "shards": 2}])
def test_ranks_step_on_while_their_parts_are_saved(
    strategy: dict[str, Any],
    make_config: Callable[..., RunConfig],
    on_ranks: Callable[[int, Callable[[int], object]], dict[int, str]],
    quiet: Console,
) -> None:
    config = make_config({"train.steps": 5, "train.checkpoint_every": 2, "train.micro_batch": 1, "parallel": strategy})

    def work(_: int) -> None:
        went_on = threading.Event()
        original = vars(module)["save_parts"]

        def late(*args: Any, **kwargs: Any) -> Any:
            assert went_on.wait(60), "the run stood still"
            return original(*args, **kwargs)

        def rate(config: RunConfig, step: int) -> float:
            if step == 3:  # counted from 0: the step after the first one since the first save has begun
                went_on.set()
            return learning_rate(config, step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "save_parts", late)
            patch.setattr(loop, "learning_rate", rate)
            train(config, quiet)

    assert on_ranks(2, work) == {}
    assert _newest(Path(config.out) / "checkpoints").step == 5
