"""`entasis data check`, and generating from a run without a tokenizer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from entasis.__main__ import run
from entasis.run.config import RunConfig

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


def test_sound_data_is_said_to_be_so(command: Command, small_data: Path) -> None:
    assert command("data", "check", str(small_data)) == (0, f"{small_data}: nothing wrong\n", "")
    status, said, _ = command("data", "check", str(small_data), "--json")
    assert (status, json.loads(said)) == (0, [])


def test_findings_are_one_a_line_with_status_1(command: Command, tmp_path: Path) -> None:
    np.array([1, 60_000], np.uint16).tofile(tmp_path / "a1.bin")
    (tmp_path / "a2.bin").write_bytes(b"x")
    arguments = ("data", "check", str(tmp_path / "a*.bin"), "--format", "nanogpt", "--vocab-size", "50257")
    status, said, errors = command(*arguments)
    assert (status, errors) == (1, "")
    first, second = said.splitlines()
    assert first.startswith(f"{tmp_path / 'a1.bin'}: token 1 is 60000, outside the vocabulary of 50257")
    assert second.startswith(f"{tmp_path / 'a2.bin'}: 1 bytes are no row of 16-bit tokens")
    status, said, _ = command(*arguments, "--json")
    assert status == 1
    assert [(Path(each["file"]).name, each["offset"], each["byte"]) for each in json.loads(said)] == [
        ("a1.bin", 1, 2),
        ("a2.bin", None, None),
    ]


def test_a_damaged_folder_has_all_its_findings(command: Command, tmp_path: Path) -> None:
    status, said, _ = command("data", "check", str(tmp_path))
    assert status == 1 and "holds no prepared data" in said


def test_what_is_not_checked_is_said(command: Command, tmp_path: Path) -> None:
    np.array([1, 60_000], np.uint16).tofile(tmp_path / "a.bin")
    status, said, _ = command("data", "check", str(tmp_path / "a.bin"), "--format", "nanogpt")
    assert status == 0 and "ids are not checked without --vocab-size" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--format", "nanogtp"), "--format: 'nanogtp' is unknown (did you mean 'nanogpt'?)"),
        (("--vocab-size", "3"), "--vocab-size: a prepared folder says so itself"),
        (("--format", "llmc"), "no such file"),
    ],
)
def test_wrong_usage_is_one_line(command: Command, arguments: tuple[str, ...], said: str) -> None:
    status, _, errors = command("data", "check", "nowhere", *arguments)
    assert status == 2 and said in errors and errors.count("\n") == 1


def test_generating_without_a_tokenizer_is_one_line(
    command: Command, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    np.arange(2000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    data = {"path": str(tmp_path / "a.bin"), "format": "nanogpt", "vocab_size": 2000, "held_out": 0.1}
    config = make_config({"data": data, "train.steps": 1})
    (tmp_path / "c.yaml").write_text(config.to_yaml(), encoding="utf-8")
    status, said, errors = command("train", str(tmp_path / "c.yaml"))
    assert (status, errors) == (0, "") and "a.bin: the last 200 tokens of 2,000 are held out" in said
    status, _, errors = command("generate", config.out, "Once")
    assert status == 1 and "carry no tokenizer" in errors and errors.count("\n") == 1
