"""`entasis coordinates`, as a person meets it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from entasis.__main__ import run
from entasis.run.config import RunConfig


@pytest.fixture
def config(make_config: Callable[..., RunConfig], tmp_path: Path) -> Path:
    made = make_config({"shape": {"family": "uniform", "layers": 2, "width": 16, "heads": 2}}, out=tmp_path / "run")
    (tmp_path / "c.yaml").write_text(made.to_yaml(), encoding="utf-8")
    return tmp_path / "c.yaml"


def _entasis(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, str, str]:
    monkeypatch.setattr(sys, "argv", ["entasis", *arguments])
    with pytest.raises(SystemExit) as caught:
        run()
    shown = capsys.readouterr()
    return caught.value.code, shown.out, shown.err


def test_a_check(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["coordinates", str(config), "-s", "model.logit_divisor=2.0", "--widths", "16,32", "--steps", "1"]
    code, said, errors = _entasis([*arguments, "--seeds", "2", "--base-width", "16"], monkeypatch, capsys)
    assert (code, errors) == (0, "")
    folder = tmp_path / "run-coordinates"
    assert said.splitlines()[-1] == str(folder / "report.html")
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert said.splitlines()[-4:-1] == results["summary"]
    assert results["command"] == (
        f"entasis coordinates {config} -s model.logit_divisor=2.0 --widths 16,32 --steps 1 --seeds 2 --flat 0.1 "
        "--base-width 16"
    )
    assert [rung["logit_divisor"] for rung in results["rungs"]] == [2, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--widths", "16,wide"], "--widths: expected whole numbers with commas between them, got '16,wide'"),
        (["--widths", "32,16"], "--widths: expected two widths or more, rising, got 32, 16"),
        (["--widths", "16,33"], "width 33: shape: layer 1: 2 heads do not divide"),
        (["--widths", "16,32", "--base-width", "0"], "--base-width: expected a width above 0, got 0"),
        (["--widths", "16,32", "--flat", "0"], "--flat: expected a slope above 0, got 0"),
        (["--widths", "16,32", "--seeds", "0"], "--steps 5, --seeds 0: expected at least 1 of each"),
    ],
)
def test_wrong_usage_is_one_line(
    config: Path,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, errors = _entasis(["coordinates", str(config), *options], monkeypatch, capsys)
    assert code == 2
    assert errors.startswith(f"error: {message}")
    assert len(errors.splitlines()) == 1
