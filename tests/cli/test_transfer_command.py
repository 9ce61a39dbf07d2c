"""`entasis transfer`, as a person meets it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from entasis.__main__ import run
from entasis.run.config import RunConfig


def test_a_transfer_check(
    make_config: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    made = make_config(
        {
            "shape": {"family": "uniform", "layers": 1, "width": 16, "heads": 2},
            "train.steps": 1,
            "transfer": {"widths": [16, 32], "learning_rate": [1e-3, 2e-3, 4e-3], "seeds": [0, 1]},
        },
        out=tmp_path / "study",
    )
    (tmp_path / "c.yaml").write_text(made.to_yaml(), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["entasis", "transfer", str(tmp_path / "c.yaml"), "-s", "transfer.seeds=[3]"])
    with pytest.raises(SystemExit) as caught:
        run()
    shown = capsys.readouterr()
    assert (caught.value.code, shown.err) == (0, "")
    assert shown.out.splitlines()[-1] == str(tmp_path / "study" / "report.html")
    results = json.loads((tmp_path / "study" / "results.json").read_text(encoding="utf-8"))
    assert shown.out.splitlines()[-2] == results["families"]["uniform"]["moves"][0]["sentence"]
    assert results["seeds"] == [3]
    assert results["command"] == f"entasis transfer {tmp_path / 'c.yaml'} -s 'transfer.seeds=[3]'"
