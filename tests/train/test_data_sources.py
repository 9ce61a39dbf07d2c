"""Runs on other programs' files, on mixtures, and on data that changed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from entasis.data.dataset import TokenData
from entasis.errors import ConfigError, EntasisError
from entasis.run.config import RunConfig, parse_config
from entasis.run.folder import RunFolder
from entasis.run.load import load_run
from entasis.train.loop import train

MakeConfig = Callable[..., RunConfig]
Outcome = Any
EOS = 256


@pytest.fixture
def console(tmp_path: Path) -> Console:
    """A console whose text can be read with `_said`."""
    return Console(record=True, width=300, file=(tmp_path / "said.txt").open("w", encoding="utf-8"))


def _said(console: Console) -> str:
    return console.export_text(clear=False)


def _losses(config: RunConfig) -> list[tuple[float, float | None]]:
    return [(record["train_loss"], record.get("val_loss")) for record in RunFolder(Path(config.out)).read_metrics()]


def _as_nanogpt(data: Path, folder: Path) -> dict[str, Any]:
    """The tokens of a prepared folder as nanoGPT's pair of files, and the settings that read them."""
    opened = TokenData.open(data)
    for split, name in ((opened.train, "train.bin"), (opened.held_out, "val.bin")):
        split.read(0, split.tokens).astype(np.uint16).tofile(folder / name)
    return {
        "path": str(folder / "train.bin"),
        "held_out": str(folder / "val.bin"),
        "format": "nanogpt",
        "vocab_size": 257,
        "eos_id": EOS,
    }


@pytest.mark.parametrize("document_mask", [False, True])
def test_the_same_tokens_give_the_same_run_whoever_wrote_them(
    make_config: MakeConfig, quiet: Console, small_data: Path, tmp_path: Path, document_mask: bool
) -> None:
    prepared = make_config({"data.document_mask": document_mask}, out=tmp_path / "prepared")
    foreign = make_config(
        {"data": _as_nanogpt(small_data, tmp_path) | {"document_mask": document_mask}}, out=tmp_path / "foreign"
    )
    train(prepared, quiet)
    train(foreign, quiet)
    assert _losses(foreign) == _losses(prepared)
    loaded = load_run(Path(foreign.out))
    assert loaded.step == 12
    with pytest.raises(EntasisError, match="trained on nanogpt files, which carry no tokenizer"):
        _ = loaded.tokenizer


def test_the_tail_that_is_held_out_is_said_and_resuming_is_exact(
    make_config: MakeConfig,
    console: Console,
    small_data: Path,
    tmp_path: Path,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Callable[[Outcome, Outcome], None],
) -> None:
    data = _as_nanogpt(small_data, tmp_path) | {"held_out": 0.2}
    settings = {"data": data, "schedule.name": "constant"}
    train(make_config(settings, out=tmp_path / "one"), console)
    for steps in (4, 12):
        train(make_config({**settings, "train.steps": steps}, out=tmp_path / "two"), console)
    assert_same_bits(outcome(tmp_path / "one"), outcome(tmp_path / "two"))
    total = TokenData.open(small_data).train.tokens
    assert re.search(rf"train\.bin: the last \d+ tokens of {total} are held out", _said(console))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"path": "x", "format": "nanogpt"}, "data.vocab_size: missing; nanogpt files do not say"),
        ({"path": "x", "format": "nanogpt", "vocab_size": 9, "eos_id": 9}, "data.eos_id: 9 is outside"),
        (
            {"path": "x", "format": "llmc", "vocab_size": 9, "document_mask": True},
            "data.document_mask: llmc files do not say where documents end; set data.eos_id",
        ),
        ({"path": "x", "held_out": 0.1}, "data.held_out: a prepared folder says so itself"),
        ({"path": "x", "eos_id": 1}, "data.eos_id: a prepared folder says so itself"),
        ({"path": "x", "format": "parquet"}, "data.format: "),
        ({"path": "x", "held_out": 1.5, "format": "nanogpt", "vocab_size": 9}, "data.held_out"),
        ({}, "data.path: missing"),
        ({"path": "x", "mixture": [{"path": "y"}]}, "data.path: stands beside data.mixture"),
        ({"format": "llmc", "mixture": [{"path": "y"}]}, "data.format: stands beside data.mixture"),
        ({"mixture": []}, "data.mixture: "),
        ({"mixture": [{"path": "y", "weight": 0.0}]}, "data.mixture.0.weight: "),
        ({"mixture": [{"path": "y"}, {"path": "z", "eos_id": 3}]}, "data.mixture.1.eos_id: a prepared folder"),
        (
            {"mixture": [{"path": "y", "wieght": 1.0}]},
            "data.mixture.0.wieght: unknown setting (did you mean 'weight'?)",
        ),
    ],
)
def test_settings_that_do_not_fit_are_one_line(settings: dict[str, Any], data: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(settings | {"data": data})
    assert said in str(caught.value) and "\n" not in str(caught.value)


def _mixture(first: Path, second: Path) -> dict[str, Any]:
    return {"mixture": [{"path": str(first), "weight": 0.7}, {"path": str(second), "weight": 0.3}]}


def test_a_mixture_is_trained_resumed_exactly_and_told_by_source(
    make_config: MakeConfig,
    console: Console,
    small_data: Path,
    other_data: Path,
    tmp_path: Path,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Callable[[Outcome, Outcome], None],
) -> None:
    settings = {"data": _mixture(small_data, other_data), "schedule.name": "constant"}
    train(make_config(settings, out=tmp_path / "one"), console)
    for steps in (3, 6, 12):
        train(make_config({**settings, "train.steps": steps}, out=tmp_path / "two"), console)
    # Another last step adds an evaluation, and nothing else.
    one, two = outcome(tmp_path / "one"), outcome(tmp_path / "two")
    two.metrics[:] = [
        {name: value for name, value in record.items() if name in other}
        for record, other in zip(two.metrics, one.metrics, strict=True)
    ]
    assert_same_bits(one, two)
    last = one.metrics[-1]
    names = ["text.txt 1", "text.txt 2"]
    assert list(last["source_tokens"]) == list(last["source_epochs"]) == list(last["source_val_losses"]) == names
    assert sum(last["source_tokens"].values()) == 12 * 64
    assert last["source_tokens"][names[0]] == pytest.approx(0.7 * 12 * 64, abs=2 * 16)
    losses = last["source_val_losses"]
    assert last["val_loss"] == pytest.approx(0.7 * losses[names[0]] + 0.3 * losses[names[1]])
    assert losses[names[0]] != losses[names[1]]
    assert "text.txt 1: " in _said(console) and "epochs" in _said(console)


def test_a_mixture_of_one_is_the_source(
    make_config: MakeConfig, quiet: Console, small_data: Path, tmp_path: Path
) -> None:
    alone = make_config(out=tmp_path / "alone")
    mixed = make_config({"data": {"mixture": [{"path": str(small_data), "weight": 3.0}]}}, out=tmp_path / "mixed")
    train(alone, quiet)
    train(mixed, quiet)
    assert _losses(alone) == _losses(mixed)


def test_other_data_is_taken_only_when_told(
    make_config: MakeConfig, console: Console, small_data: Path, other_data: Path
) -> None:
    train(make_config({"train.steps": 3}), console)
    changed = make_config({"train.steps": 6, "data.path": str(other_data)})
    with pytest.raises(EntasisError, match=r"trained on other data .* --accept-data-change"):
        train(changed, console)
    train(changed, console, accept_data_change=True)
    said = _said(console)
    fingerprints = [TokenData.open(path).fingerprint for path in (small_data, other_data)]
    assert f"changed since the run began: the data, as accepted: {fingerprints[0]} -> {fingerprints[1]}" in said
    assert "goes on after step 3 of 6" in said
    log = RunFolder(Path(changed.out)).log_file.read_text(encoding="utf-8")
    assert f"the data, as accepted: {fingerprints[0]}" in log
    train(make_config({"train.steps": 7, "data.path": str(other_data)}), console)  # from now on it is the run's data


def test_files_that_changed_under_the_same_manifest_are_found(
    make_config: MakeConfig, console: Console, small_data: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(small_data, data)
    settings = {"data.path": str(data)}
    train(make_config({**settings, "train.steps": 3}), console)
    train(make_config({**settings, "train.steps": 4}), console)
    assert "comparing their content" not in _said(console), "nothing is read that nobody touched"
    shard = data / "train-00000.npy"
    os.utime(shard)
    train(make_config({**settings, "train.steps": 5}), console)
    assert "1 of 4 data files are newer than the run" in _said(console)
    tokens = np.load(shard)
    tokens[3] ^= 1
    np.save(shard, tokens)
    with pytest.raises(EntasisError, match=r"train-00000\.npy: changed since the run began"):
        train(make_config({**settings, "train.steps": 6}), console)
    train(make_config({**settings, "train.steps": 6}), console, accept_data_change=True)
    assert "train-00000.npy: changed since the run began, and is not what the manifest says; accepted" in _said(console)


def test_a_remote_folder_is_trained_on(
    make_config: MakeConfig, console: Console, small_data: Path, tmp_path: Path
) -> None:
    remote = make_config(
        {"data": {"path": small_data.as_uri(), "cache": str(tmp_path / "cache")}}, out=tmp_path / "remote"
    )
    local = make_config(out=tmp_path / "local")
    train(remote, console)
    train(local, console)
    assert _losses(remote) == _losses(local)
    assert f"{small_data.as_uri()}: fetching 4 of 4 files" in _said(console)
