"""From run folders to numbers: which records count, and how curves are thinned."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from entasis.run.config import RunConfig
from entasis.run.folder import RunFolder
from entasis.study.results import _run_result, _title

MakeConfig = Callable[..., RunConfig]


def _written(folder: RunFolder, steps: range, *, rate: float = 100.0, loss: float = 10.0, every: int = 4) -> None:
    folder.path.mkdir(parents=True, exist_ok=True)
    for step in steps:
        record: dict[str, Any] = {
            "step": step,
            "tokens": 64 * step,
            "train_loss": loss - step / 1000,
            "tokens_per_second": rate,
        }
        if step % every == 0 or step == steps[-1]:
            record["val_loss"] = loss - step / 1000
        folder.append_metrics(record)


@pytest.fixture
def config(make_config: MakeConfig, tmp_path: Path) -> RunConfig:
    return make_config({"train.steps": 10, "train.evaluate_every": 4}, out=tmp_path / "study")


@pytest.fixture
def folder(config: RunConfig) -> RunFolder:
    return RunFolder(Path(config.out) / "runs" / "a-seed3")


def test_a_run_in_numbers(config: RunConfig, folder: RunFolder) -> None:
    _written(folder, range(1, 11))
    result = _run_result(folder.path, 3, config, bytes_per_token=2.0)
    assert (result["seed"], result["folder"]) == (3, "runs/a-seed3")
    assert [point["step"] for point in result["curve"]] == [4, 8, 10]
    assert result["final_val_loss"] == result["best_val_loss"] == pytest.approx(9.99)
    assert result["best_step"] == 10
    assert result["final_bits_per_byte"] == pytest.approx(9.99 / 0.6931471805599453 / 2)


def test_the_best_step_may_lie_before_the_last(config: RunConfig, folder: RunFolder) -> None:
    _written(folder, range(1, 9))
    _written(folder, range(9, 11), loss=11.0)
    result = _run_result(folder.path, 3, config, bytes_per_token=1.0)
    assert result["best_step"] == 8
    assert result["best_val_loss"] == pytest.approx(9.992)
    assert result["final_val_loss"] == pytest.approx(10.99)


def test_steps_that_were_done_again_count_once(config: RunConfig, folder: RunFolder) -> None:
    """Killed at step 8, gone on from step 6; and evaluations that only a shorter run had made."""
    _written(folder, range(1, 8), every=7)
    _written(folder, range(7, 9), loss=20.0, every=100)
    _written(folder, range(7, 11))
    result = _run_result(folder.path, 3, config, bytes_per_token=1.0)
    assert [point["step"] for point in result["train_curve"]] == list(range(1, 11))
    assert [point["step"] for point in result["curve"]] == [8, 10]
    assert result["curve"][0]["val_loss"] == pytest.approx(9.992)


def test_the_rate_is_the_median_without_the_first_steps(config: RunConfig, folder: RunFolder) -> None:
    _written(folder, range(1, 4), rate=1.0)
    _written(folder, range(4, 10), rate=100.0)
    _written(folder, range(10, 11), rate=10_000.0)
    assert _run_result(folder.path, 3, config, bytes_per_token=1.0)["tokens_per_second"] == 100


def test_a_run_shorter_than_the_warm_steps_has_a_rate(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config({"train.steps": 2}, out=tmp_path)
    folder = RunFolder(tmp_path / "runs" / "a-seed0")
    _written(folder, range(1, 3), rate=50.0)
    result = _run_result(folder.path, 0, config, bytes_per_token=1.0)
    assert result["tokens_per_second"] == 50
    assert [point["step"] for point in result["curve"]] == [2]


@pytest.mark.parametrize("steps", [199, 200, 201, 400, 1001])
def test_training_curves_are_thinned_evenly(steps: int, make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config({"train.steps": steps}, out=tmp_path)
    folder = RunFolder(tmp_path / "runs" / "a-seed0")
    _written(folder, range(1, steps + 1))
    points = [point["step"] for point in _run_result(folder.path, 0, config, bytes_per_token=1.0)["train_curve"]]
    assert 100 <= len(points) <= 200
    strides = {after - before for before, after in pairwise(points)}
    assert len(strides) == 1
    assert steps - points[-1] < strides.pop()


def test_titles() -> None:
    assert _title(["a"]) == "a"
    assert _title(["a", "b"]) == "a and b"
    assert _title(["a", "b", "c"]) == "a, b and c"


def test_the_load_of_experts_is_that_of_the_last_step(config: RunConfig, folder: RunFolder) -> None:
    _written(folder, range(1, 11))
    plain = _run_result(folder.path, 3, config, bytes_per_token=2.0)
    assert plain["expert_load"] == []
    record = {**folder.read_metrics()[-1], "expert_load": {"1": [0.25, 0.75], "3": [0.5, 0.5]}}
    folder.append_metrics(record)
    result = _run_result(folder.path, 3, config, bytes_per_token=2.0)
    assert result["expert_load"] == [
        {"layer": 1, "shares": [0.25, 0.75]},
        {"layer": 3, "shares": [0.5, 0.5]},
    ]
