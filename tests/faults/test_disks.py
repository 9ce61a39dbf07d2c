"""A disk that fills up, a folder that cannot be written, a clock that jumps, and two processes on one folder."""

from __future__ import annotations

import datetime
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from entasis.cli.main import run_command
from entasis.errors import EntasisError
from entasis.run import folder as folder_module
from entasis.run.config import RunConfig
from entasis.run.folder import RunFolder
from entasis.train.loop import train

MakeConfig = Callable[..., RunConfig]
Outcome = Any
Same = Callable[[Outcome, Outcome], None]


def _mount(*options: str) -> None:
    done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small file system of one's own cannot be mounted here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, in memory; its size is set with `mount -o remount,size=`."""
    if os.geteuid():
        pytest.skip("mounting a small file system needs root; a refused write is tested in test_checkpoint.py")
    disk = tmp_path / "disk"
    disk.mkdir()
    _mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk))
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _command(config: RunConfig, file: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Exit status and the lines of standard error."""
    file.write_text(config.to_yaml(), encoding="utf-8")
    capsys.readouterr()
    status = run_command(["train", str(file)])
    return status, capsys.readouterr().err.splitlines()


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_moment(
    small_disk: Path,
    make_config: MakeConfig,
    quiet: Console,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Same,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Full earlier and later in the run: one line, the older checkpoints kept, and with room it goes on."""
    whole = make_config(out=tmp_path / "whole")
    train(whole, quiet)
    needed = sum(path.stat().st_size for path in Path(whole.out).rglob("*")) // 1024
    statuses = []
    # KiB: from room for not even the configuration to room for one checkpoint more than are kept.
    for number, size in enumerate(range(8, 2 * needed + 100, max(1, needed // 7))):
        _mount("-o", f"remount,size={size}k", str(small_disk))
        config = make_config(out=small_disk / f"run-{number}")
        status, errors = _command(config, tmp_path / "c.yaml", capsys)
        statuses.append(status)
        if status:
            assert status == 1
            assert len(errors) == 1, errors
            assert "o space left on device" in errors[0]
            assert str(small_disk) in errors[0], "the line names no file"
            steps = [int(path.name[-8:]) for path in Path(config.out).glob("checkpoints/step-*")]
            _mount("-o", "remount,size=64m", str(small_disk))
            assert not steps or outcome(Path(config.out)).step == max(steps), "what was saved is damaged"
            status, errors = _command(config, tmp_path / "c.yaml", capsys)
        assert (status, errors) == (0, [])
        assert_same_bits(outcome(Path(config.out)), outcome(tmp_path / "whole"))
        subprocess.run(["rm", "-r", config.out], check=True)
    assert statuses[0] == 1, "the smallest disk had room"
    assert statuses[-1] == 0, "the largest disk had not"
    assert sum(statuses) >= 6, "too few sizes were too small"


def test_a_folder_that_became_read_only(
    small_disk: Path,
    make_config: MakeConfig,
    quiet: Console,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Same,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    config = make_config({"train.steps": 3}, out=small_disk / "run")
    longer = make_config({"train.steps": 6}, out=small_disk / "run")
    train(config, quiet)
    _mount("-o", "remount,ro", str(small_disk))
    for out, changes in ((small_disk / "run", {}), (small_disk / "new", {}), (small_disk / "run", {"train.steps": 6})):
        status, errors = _command(make_config({"train.steps": 3, **changes}, out=out), tmp_path / "c.yaml", capsys)
        assert status in (1, 2)
        assert len(errors) == 1
        assert str(small_disk) in errors[0]
        assert "ead-only file system" in errors[0]
    _mount("-o", "remount,rw", str(small_disk))
    assert outcome(Path(config.out)).step == 3
    train(longer, quiet)
    assert outcome(Path(config.out)).step == 6


class _WildDate(datetime.datetime):
    """A wall clock that runs backwards, by days."""

    _left = 400

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _WildDate:
        cls._left -= 3
        return cls(2001, 1, 1, tzinfo=tz) + datetime.timedelta(days=cls._left)


def test_a_clock_that_jumps(
    make_config: MakeConfig,
    console_said: tuple[Console, Callable[[], str]],
    quiet: Console,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Same,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Back by years, on by years, by turns; file times in reverse order: nothing but the log's stamps shows it."""
    constant = {"schedule": {"name": "constant", "warmup_steps": 3}}  # does not depend on the number of steps
    whole = make_config({**constant, "train.evaluate_every": 6}, out=tmp_path / "whole")
    train(whole, quiet)
    console, said = console_said
    config = make_config({**constant, "train.evaluate_every": 6, "train.steps": 6})
    calls = 0

    def wild() -> float:
        nonlocal calls
        calls += 1
        return 1e9 + (1e8 if calls % 2 else -1e8) * (calls % 7)

    with monkeypatch.context() as patch:
        patch.setattr(time, "time", wild)
        patch.setattr(time, "monotonic", wild)
        patch.setattr(folder_module, "datetime", _WildDate)
        train(config, quiet)
        for age, path in enumerate(sorted(Path(config.out).glob("checkpoints/step-*"))):
            for file in (path, *path.iterdir()):
                os.utime(file, (10**9 - 10**6 * age,) * 2)
        train(make_config({**constant, "train.evaluate_every": 6}), console)
    assert "goes on after step 6 of 12" in said()
    assert_same_bits(outcome(Path(config.out)), outcome(Path(whole.out)))
    rates = [record["tokens_per_second"] for record in RunFolder(Path(config.out)).read_metrics()]
    usual = [record["tokens_per_second"] for record in RunFolder(Path(whole.out)).read_metrics()]
    assert min(usual) / 50 < min(rates), "a jump of the wall clock is in the throughput"
    assert max(rates) < max(usual) * 50, "a jump of the wall clock is in the throughput"


@pytest.fixture
def console_said(tmp_path: Path) -> tuple[Console, Callable[[], str]]:
    console = Console(record=True, width=500, file=(tmp_path / "said").open("w", encoding="utf-8"))
    return console, lambda: console.export_text(clear=False)


def test_two_processes_start_the_same_run_at_once(
    make_config: MakeConfig,
    quiet: Console,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Same,
    in_child: Callable[..., int],
    tmp_path: Path,
) -> None:
    """One trains, the other is told so; or it comes when the first has finished. The run is the same."""
    whole = make_config(out=tmp_path / "whole")
    train(whole, quiet)
    refused = 0
    for number in range(6):
        config = make_config(out=tmp_path / f"shared {number}")

        def begin(config: RunConfig = config) -> None:
            try:
                train(config, quiet)
            except EntasisError as error:
                assert "is working in this run folder" in str(error)
                os._exit(7)

        first = os.fork()
        if first == 0:
            begin()
            os._exit(0)
        second = in_child(begin)
        codes = {second, os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])}
        assert codes in ({0}, {0, 7})
        refused += 7 in codes
        assert_same_bits(outcome(Path(config.out)), outcome(Path(whole.out)))
    assert refused, "the two never met"
