"""`entasis train` and `entasis generate`, as a person meets them."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entasis.__main__ import run
from entasis.run.config import RunConfig, load_config
from entasis.run.folder import RunFolder
from entasis.train import loop
from entasis.train.interrupt import StopRequest

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `entasis` in this process: status, standard output, standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["entasis", *arguments])
        with pytest.raises(SystemExit) as caught:
            run()
        shown = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, shown.out, shown.err

    return call


@pytest.fixture
def config(make_config: Callable[..., RunConfig], tmp_path: Path) -> Path:
    file = tmp_path / "c.yaml"
    file.write_text(make_config({"train.steps": 4}).to_yaml(), encoding="utf-8")
    return file


def _out(config: Path) -> str:
    return load_config(config).out


def test_train_go_on_and_generate(config: Path, command: Command) -> None:
    out = _out(config)
    status, said, errors = command("train", str(config))
    assert (status, errors) == (0, "")
    assert said.splitlines()[-1] == f"done: {out}"

    status, said, errors = command("train", str(config))
    assert (status, errors) == (0, "")
    assert f"{out}: already finished, 4 of 4 steps" in said

    status, said, errors = command("train", str(config), "-s", "train.steps=6", "--set", "train.evaluate_every=1")
    assert (status, errors) == (0, "")
    assert f"{out}: goes on after step 4 of 6" in said
    assert "changed since the run began: train.steps: 4 -> 6" in said

    status, said, errors = command("generate", out, "The sea", "--tokens", "12", "--seed", "3")
    assert (status, errors) == (0, "")
    assert said.startswith("The sea")
    assert command("generate", out, "The sea", "--tokens", "12", "--seed", "3")[1] == said
    assert command("generate", out, "--tokens", "0")[:2] == (0, "\n")
    for option, value in (("--tokens", "-1"), ("--temperature", "-1"), ("--top-k", "-1"), ("--seed", "-1")):
        status, _, errors = command("generate", out, "x", option, value)
        assert status == 2
        assert errors.startswith(f"error: {option[2:].replace('-', '_')}: expected")


def test_an_encoder_is_trained_and_generates_nothing(config: Path, command: Command) -> None:
    status, said, errors = command("train", str(config), "-s", "model.causal=false", "-s", "train.mask_share=0.5")
    assert (status, errors) == (0, "")
    assert said.splitlines()[-1] == f"done: {_out(config)}"
    status, said, errors = command("generate", _out(config), "The sea")
    assert (status, said) == (2, "")
    assert errors.startswith("error: causal: false: an encoder has not learned to continue a text")
    assert len(errors.splitlines()) == 1
    status, said, errors = command(
        "train", str(config), "-s", "model.causal=false", "-s", "data.vocab_size=257", "--plan"
    )
    assert (status, errors) == (0, "")


def test_a_refused_change_is_one_line(config: Path, command: Command) -> None:
    command("train", str(config), "-s", "train.steps=1")
    status, said, errors = command("train", str(config), "-s", "train.steps=1", "-s", "train.seed=5")
    assert status == 2
    assert errors.splitlines() == [
        f"error: train.seed: the run in {_out(config)} was begun with 0, and now it is 5; "
        "set it back, or choose another `out`"
    ]
    assert said == ""


def test_a_run_that_diverges_ends_with_one(config: Path, command: Command) -> None:
    status, _, errors = command(
        "train", str(config), "-s", "optimizer.learning_rate=1e38", "-s", "schedule.warmup_steps=0"
    )
    assert status == 1
    assert len(errors.splitlines()) == 1
    assert errors.startswith("error: step ")


@pytest.mark.parametrize(
    ("number", "expected"),
    [(signal.SIGINT, 1), (signal.SIGHUP, 1), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)],
    ids=str,
)
def test_a_signal_ends_with_a_line_that_says_how_to_go_on(
    number: signal.Signals, expected: int, config: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = vars(loop)["learning_rate"]

    def share(config: RunConfig, step: int) -> Any:
        if step == 1:
            os.kill(os.getpid(), number)
        return original(config, step)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "learning_rate", share)
        status, said, errors = command("train", str(config))
    assert status == expected, "a scheduler's script starts it again, and Ctrl-C is a person's"
    assert "done" not in said, "fewer updates than asked is not success"
    assert errors == (
        f"error: stopped by {number.name}: step 2 of 4 is saved in {_out(config)}; "
        "the same command goes on from there\n"
    )
    status, said, _ = command("train", str(config))
    assert status == 0
    assert "goes on after step 2 of 4" in said


def test_a_closed_terminal_ends_nothing_that_was_started_with_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.name is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_schedulers_signal_outside_the_steps_asks_for_another_start(
    number: signal.Signals, config: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a checkpoint is read: the signal must not pass for a damaged file, and nothing is changed."""
    command("train", str(config), "-s", "train.steps=2")
    original = vars(loop)["load_newest"]
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]

    def load(*args: Any) -> Any:
        os.kill(os.getpid(), number)
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "load_newest", load)
        status, said, errors = command("train", str(config))
    assert (status, said) == (75, "")
    assert errors == f"error: stopped by {number.name}: what is saved is kept; the same command goes on from there\n"
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)] == handlers
    assert "goes on after step 2 of 4" in command("train", str(config))[1]


def _in_terminal(config: RunConfig, tmp_path: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Starts the run in a terminal that it owns; the process, and our end of the terminal."""
    (tmp_path / "c.yaml").write_text(config.to_yaml(), encoding="utf-8")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "entasis", "train", str(tmp_path / "c.yaml")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - one system call, no locks
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    return process, ours


@pytest.mark.slow
def test_ctrl_c_in_a_terminal(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """A true terminal: the bar moves, Ctrl-C saves, and the terminal is left in order."""
    config = make_config({"train.steps": 100_000, "train.evaluate_every": 20, "train.checkpoint_every": 100_000})
    process, ours = _in_terminal(config, tmp_path)
    shown = b""
    deadline = time.monotonic() + 60
    interrupted = False
    while time.monotonic() < deadline:
        ready, _, _ = select.select([ours], [], [], 0.1)
        if ready:
            try:
                piece = os.read(ours, 65_536)
            except OSError:  # the other side is closed
                break
            shown += piece
        if not interrupted and b"held-out" in shown:
            process.send_signal(signal.SIGINT)
            interrupted = True
    assert process.wait(timeout=30) == 1
    text = shown.decode()
    assert "tokens/s" in text
    assert "/100000" in text
    assert "stopped by SIGINT: step " in text.replace("\r\n", " ")
    assert text.rstrip().endswith("goes on from there")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h"), "the cursor is shown again"
    saved = sorted((Path(config.out) / "checkpoints").iterdir())
    assert len(saved) == 1
    assert int(saved[0].name.removeprefix("step-")) == RunFolder(Path(config.out)).read_metrics()[-1]["step"]


@pytest.mark.slow
def test_a_terminal_that_is_closed(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """The step in hand is saved, though what is written fails from then on."""
    config = make_config({"train.steps": 100_000, "train.evaluate_every": 20, "train.checkpoint_every": 100_000})
    process, ours = _in_terminal(config, tmp_path)
    shown = b""
    while b"held-out" not in shown:
        shown += os.read(ours, 65_536)
    os.close(ours)
    assert process.wait(timeout=30) == 1
    saved = sorted((Path(config.out) / "checkpoints").iterdir())
    assert len(saved) == 1
    assert int(saved[0].name.removeprefix("step-")) == RunFolder(Path(config.out)).read_metrics()[-1]["step"]
