"""A comparison on other programs' tokens says what it cannot know; one on a mixture knows it by weight."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from entasis.data.dataset import TokenData
from entasis.run.config import RunConfig
from entasis.study.compare import compare

MakeConfig = Callable[..., RunConfig]

_STUDY: dict[str, Any] = {
    "train.steps": 2,
    "train.evaluate_every": 2,
    "shape": {"family": "uniform", "layers": 2, "width": 32, "heads": 4},
    "compare": {"shapes": {"uniform": {"family": "uniform"}}, "seeds": [0]},
}


def test_without_tokenizer_and_bytes_the_report_speaks_of_tokens_only(make_config: MakeConfig, tmp_path: Path) -> None:
    np.random.default_rng(0).integers(0, 300, 4000).astype(np.uint16).tofile(tmp_path / "train.bin")
    data = {"path": str(tmp_path / "train.bin"), "format": "nanogpt", "vocab_size": 300, "held_out": 0.2}
    config = make_config(_STUDY | {"data": data}, out=tmp_path / "study")
    results = compare(config, Console(quiet=True), command="entasis compare c.yaml")
    summary, shape = results["data"], results["shapes"]["uniform"]
    unknown = (summary["tokenizer"], summary["unigram_bits_per_byte"], summary["held_out_bytes_per_token"])
    assert unknown == (None, None, None)
    assert (summary["train_tokens"], summary["held_out_tokens"], summary["name"]) == (3200, 800, "train.bin")
    assert (shape["mean_bits_per_byte"], shape["sample"], shape["runs"][0]["final_bits_per_byte"]) == (None, None, None)
    report = (tmp_path / "study" / "report.html").read_text(encoding="utf-8")
    assert "Losses per token only." in report and "not known, 300 entries" in report
    assert (
        "nats per token" in report
        and 'id="samples"' not in report
        and "unigram" not in re.sub(r"<style>.*?</style>", "", report, flags=re.DOTALL)
    )
    assert report.lower().count("bits per byte") == 1, "where it says that there is none"
    assert "per held-out token" not in report


def test_of_a_mixture_bytes_and_epochs_are_those_of_its_shares(
    make_config: MakeConfig, small_data: Path, other_data: Path, tmp_path: Path
) -> None:
    data = {"mixture": [{"path": str(small_data), "weight": 3.0}, {"path": str(other_data), "weight": 1.0}]}
    config = make_config(_STUDY | {"data": data, "train.steps": 10}, out=tmp_path / "study")
    results = compare(config, Console(quiet=True), command="entasis compare c.yaml")
    sources = [TokenData.open(path) for path in (small_data, other_data)]
    bytes_per_token = [source.bytes_per_token or 0 for source in sources]
    assert results["data"]["held_out_bytes_per_token"] == pytest.approx(
        0.75 * bytes_per_token[0] + 0.25 * bytes_per_token[1]
    )
    assert results["epochs"] == pytest.approx(10 * 4 * 0.75 / sources[0].train.windows(16))
    assert results["shapes"]["uniform"]["sample"] is not None
    report = (tmp_path / "study" / "report.html").read_text(encoding="utf-8")
    assert "text.txt 1 + text.txt 2" in report and "unigram model" not in report
