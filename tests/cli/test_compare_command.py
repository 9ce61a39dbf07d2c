"""`entasis compare`, as a person meets it."""

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
    made = make_config(
        {
            "shape": {"family": "uniform", "layers": 2, "width": 16, "heads": 4},
            "train.steps": 2,
            "train.evaluate_every": 1,
            "compare": {
                "shapes": {"uniform": {}, "prism": {"family": "prism", "heads": [2, 4]}, "wide": {"width": 24}},
                "seeds": [0, 1],
            },
        },
        out=tmp_path / "study",
    )
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


def test_a_comparison(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, said, errors = _entasis(["compare", str(config)], monkeypatch, capsys)
    assert code == 2
    assert errors.startswith("error: compare.match: wide has ")
    assert len(errors.splitlines()) == 1

    arguments = ["compare", str(config), "-s", "compare.prompt=the sea", "--allow-unequal"]
    code, said, errors = _entasis(arguments, monkeypatch, capsys)
    assert (code, errors) == (0, "")
    lines = said.splitlines()
    assert lines[-1] == str(tmp_path / "study" / "report.html")
    results = json.loads((tmp_path / "study" / "results.json").read_text(encoding="utf-8"))
    assert lines[-3:-1] == [results["shapes"][name]["difference"]["sentence"] for name in ("prism", "wide")]
    assert results["command"] == f"entasis compare {config} -s 'compare.prompt=the sea' --allow-unequal"
    assert results["unequal"] == ["wide"]
    assert "<html" in (tmp_path / "study" / "report.html").read_text(encoding="utf-8")
