"""`entasis train --nproc`: several processes on this machine, and what a person sees of one that fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from entasis.run.config import RunConfig
from entasis.run.folder import RunFolder

MakeConfig = Callable[..., RunConfig]


def start(config: RunConfig, tmp_path: Path, *settings: str) -> subprocess.Popen[str]:
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml(), encoding="utf-8")
    command = [sys.executable, "-m", "entasis", "train", str(file), "--nproc", "2"]
    return subprocess.Popen(
        [*command, *(part for each in settings for part in ("-s", each))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def long_run(make_config: MakeConfig, tmp_path: Path) -> tuple[subprocess.Popen[str], RunFolder]:
    """A run of two ranks that takes its first steps, and its folder."""
    config = make_config({"train.micro_batch": 1, "train.steps": 100_000, "train.checkpoint_every": 100_000})
    process, folder = start(config, tmp_path), RunFolder(Path(config.out))
    deadline = time.monotonic() + 60
    while not folder.metrics_file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return process, folder


def test_two_processes(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config({"train.micro_batch": 1})
    process = start(config, tmp_path, "train.steps=4")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.count("train: held-out loss") == 1, "the first rank alone speaks"
    assert out.count("done") == 1
    assert out.splitlines()[-1] == f"done: {config.out}"
    assert [record["step"] for record in RunFolder(Path(config.out)).read_metrics()] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_signal_is_passed_on_once(make_config: MakeConfig, tmp_path: Path) -> None:
    process, folder = long_run(make_config, tmp_path)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert err.splitlines()[-1].startswith("error: stopped by SIGTERM: the 2 ranks were asked to save")
    assert "Traceback" not in err
    assert list(folder.checkpoints.glob("step-*"))


@pytest.mark.slow
def test_a_schedulers_signal_to_one_rank_stops_all_and_asks_for_another_start(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    process, folder = long_run(make_config, tmp_path)
    os.kill(int((folder.path / ".lock").read_text()), signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert err.splitlines()[-1].startswith("error: a scheduler's signal to one of 2 ranks stopped all")
    assert list(folder.checkpoints.glob("step-*"))


@pytest.mark.slow
def test_ranks_leave_without_their_launcher(make_config: MakeConfig, tmp_path: Path) -> None:
    process, folder = long_run(make_config, tmp_path)
    process.kill()
    process.communicate(timeout=60)  # the ranks have its pipes, so that this lasts until they are gone, too
    with folder.locked():
        assert list(folder.checkpoints.glob("step-*"))


@pytest.mark.slow
def test_a_rank_that_fails_is_named(make_config: MakeConfig, tmp_path: Path) -> None:
    """The second rank alone cannot read its plugin's file."""
    plugin = tmp_path / "plugin.py"
    plugin.write_text("import os\nif os.environ.get('RANK') == '1':\n    os._exit(9)\n", encoding="utf-8")
    process = start(make_config({"train.micro_batch": 1, "plugins": [str(plugin)]}), tmp_path)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 9
    assert err.splitlines()[-1] == "error: rank 1 of 2 failed (exit status 9); the others were ended"
    assert "Traceback" not in err


def test_a_batch_that_they_cannot_share(make_config: MakeConfig, tmp_path: Path) -> None:
    process = start(make_config(), tmp_path, "train.micro_batch=4")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.splitlines() == [err.strip()]
    assert "2 ranks cannot share in passes of train.micro_batch 4" in err
