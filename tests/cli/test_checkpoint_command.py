"""`entasis checkpoint`: lists, checks, and one file that other programs read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors import safe_open

from entasis.cli.main import run_command
from entasis.run.config import RunConfig
from entasis.run.load import load_run
from entasis.train.loop import train

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def run(make_config: MakeConfig) -> Path:
    """A run with checkpoints of steps 2 and 4."""
    config = make_config({"train.steps": 4, "train.checkpoint_every": 2})
    train(config, Console(quiet=True))
    return Path(config.out)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_they_are_listed_oldest_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["checkpoint", "ls", str(run)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step-00000002  step 2  ")
    assert second.startswith("step-00000004  step 4  ")
    assert second.endswith("MiB  whole  good")


def test_a_flipped_bit_is_found_and_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["checkpoint", "verify", str(run)]) == 0
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines()] == ["good", "good"]
    damaged = run / "checkpoints/step-00000004/optimizer.safetensors"
    _flip(damaged)
    assert run_command(["checkpoint", "verify", str(run)]) == 1
    assert capsys.readouterr().out.splitlines()[1] == f"{damaged}: checksum differs; the file is damaged"
    assert run_command(["checkpoint", "verify", str(run / "checkpoints/step-00000002")]) == 0
    run_command(["checkpoint", "ls", str(run)])
    assert capsys.readouterr().out.splitlines()[-1].endswith("damaged")


def test_a_single_file_holds_the_newest_good_weights(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _flip(run / "checkpoints/step-00000004/state.json")
    out = tmp_path / "model.safetensors"
    assert run_command(["checkpoint", "convert", str(run), str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{run}/checkpoints/step-00000004/state.json: ")
    assert said[1].endswith(" weights of step 2")
    loaded = load_run(run, report=lambda _: None)
    weights = loaded.model.state_dict()
    with safe_open(str(out), "pt") as file:
        assert set(file.keys()) == weights.keys()
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in weights.items())
        header = file.metadata()
    assert json.loads(header["step"]) == 2
    assert json.loads(header["shape"]) == loaded.model.shape.to_dict()
    assert run_command(["checkpoint", "convert", str(run), str(out)]) == 1
    assert capsys.readouterr().err == f"error: {out}: exists; choose another name, or remove it\n"


@pytest.mark.parametrize("command", ["ls", "verify", "convert"])
def test_where_there_is_none_one_line_says_so(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = [str(tmp_path / "out.safetensors")] if command == "convert" else []
    assert run_command(["checkpoint", command, str(tmp_path), *more]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path}: holds no checkpoint\n"
    assert run_command(["checkpoint", command, str(tmp_path / "no"), *more]) == 1
    assert "no such folder" in capsys.readouterr().err
