"""A comparison of encoders: the same study, in terms of masked tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from entasis.bench.plan import plan
from entasis.report.schema import Comparison
from entasis.run.config import RunConfig
from entasis.shape.budget import budget
from entasis.study.compare import compare

MakeConfig = Callable[..., RunConfig]

_ENCODERS: dict[str, Any] = {
    "model.causal": False,
    "train.mask_share": 0.25,
    "train.steps": 4,
    "train.evaluate_every": 2,
    "shape": {"family": "uniform", "layers": 4, "width": 32, "heads": 4},
    "compare": {
        "shapes": {
            "uniform": {"family": "uniform"},
            "bowtie": {"family": "bowtie", "bottleneck": 0.5, "turn": 3, "multiple": 8},
        },
        "seeds": [0, 1],
        "match": {"by": "effective", "tolerance": 0.1},
        "tune": {"learning_rate": [1e-3, 3e-3], "seed": 9},
    },
}


@pytest.fixture
def study(make_config: MakeConfig, tmp_path: Path) -> tuple[RunConfig, Comparison]:
    config = make_config(_ENCODERS, out=tmp_path / "study")
    return config, compare(config, Console(quiet=True), command="entasis compare c.yaml")


def test_two_encoders_compared(study: tuple[RunConfig, Comparison]) -> None:
    config, results = study
    out = Path(config.out)
    assert json.loads((out / "results.json").read_text(encoding="utf-8")) == results
    assert results["mask_share"] == 0.25
    for name, shape in results["shapes"].items():
        assert shape["mean_bits_per_byte"] is None
        assert shape["sample"] is None
        assert all(run["final_bits_per_byte"] is None for run in shape["runs"])
        own = config.for_shape(name)
        assert shape["budget"] == budget(own.design(257).shape, own.block(257)).to_dict()
        assert own.block(257).vocab_size == 258
    difference = results["shapes"]["bowtie"]["difference"]
    assert difference is not None
    assert "nats per masked token" in difference["sentence"]
    assert "nats per token" not in difference["sentence"]

    report = (out / "report.html").read_text(encoding="utf-8")
    assert "masked-token loss" in report
    assert "nats per masked token" in report
    assert "nats per token" not in report
    assert 'id="samples"' not in report
    assert report.lower().count("bits per byte") == 1, "where it says that there is none"


def test_causal_models_are_reported_as_before(make_config: MakeConfig, tmp_path: Path) -> None:
    changes = {**_ENCODERS, "model.causal": True, "train.mask_share": None}
    changes["compare"] = {**_ENCODERS["compare"], "seeds": [0], "tune": None}
    config = make_config(changes, out=tmp_path / "study")
    results = compare(config, Console(quiet=True), command="entasis compare c.yaml")
    assert results["mask_share"] is None
    assert all((shape["mean_bits_per_byte"] or 0) > 0 for shape in results["shapes"].values())
    assert all(shape["sample"] is not None for shape in results["shapes"].values())
    assert "masked" not in (tmp_path / "study" / "report.html").read_text(encoding="utf-8").split("Configuration")[0]


def test_a_plan_counts_the_mask_id(make_config: MakeConfig) -> None:
    encoder = make_config({**_ENCODERS, "data.vocab_size": 257, "compare": None})
    causal = make_config({"shape": _ENCODERS["shape"], "data.vocab_size": 257})
    (one,), (other,) = plan(encoder, "H100", 0.4).runs, plan(causal, "H100", 0.4).runs
    assert one.budget.parameters == other.budget.parameters + 2 * 32, "a row of the embedding and one of the head"
