"""Damaged files: a flipped bit or a cut anywhere in a checkpoint or in the data is found, said, and never used."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from entasis.data.dataset import TokenData
from entasis.errors import EntasisError
from entasis.run.checkpoint import Checkpoint, load_checkpoint, load_newest, save_checkpoint, verify_checkpoint
from entasis.run.config import RunConfig
from entasis.train.loop import train

MakeConfig = Callable[..., RunConfig]
Outcome = Any


def _flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(bytes(content))


def _cut(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])


def _lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n")


def _damages(file: Path, source: random.Random) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """A bit early, late and anywhere; nothing left, one byte, half, all but one byte; gone; one byte more."""
    size = file.stat().st_size
    for bit in (0, 8 * size - 1, *(source.randrange(8 * size) for _ in range(4))):
        yield f"bit {bit} flipped", lambda path, bit=bit: _flip(path, bit)  # type: ignore[misc]
    for length in (0, 1, size // 2, size - 1):
        yield f"cut to {length} bytes", lambda path, length=length: _cut(path, length)  # type: ignore[misc]
    yield "gone", Path.unlink
    yield "longer", _lengthen


@pytest.fixture(scope="module")
def saved(settings: dict[str, Any], quiet: Console, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with two checkpoints."""
    from entasis.run.config import parse_config

    out = tmp_path_factory.mktemp("saved") / "run"
    train(parse_config({**settings, "out": str(out)}), quiet)
    return out


def test_damage_to_each_file_of_a_checkpoint_in_turn(saved: Path, tmp_path: Path) -> None:
    """Whatever files a checkpoint has: the newest good one is used, and the line names the file or the folder."""
    newest = max(saved.glob("checkpoints/step-*"))
    files = [path.relative_to(saved) for path in sorted(newest.rglob("*")) if path.is_file()]
    assert len(files) >= 3
    source, tried = random.Random(3), 0
    marker = (newest / "complete.json").read_bytes().strip()
    for name in files:
        for what, damage in _damages(saved / name, source):
            tried += 1
            shutil.copytree(saved, tmp_path / str(tried))
            file = tmp_path / str(tried) / name
            damage(file)
            said: list[str] = []
            found = load_newest(tmp_path / str(tried) / "checkpoints", said.append)
            assert found is not None, (name, what)
            if file.name == "complete.json" and file.exists() and file.read_bytes().strip() == marker:
                assert (
                    found.step == 12
                )  # a line end more or less behind the list of files: nothing that is read differs
                continue
            assert found.step == 9, (name, what)
            assert len(said) == 1, (name, what)
            assert "step-00000012" in said[0]
            assert "\n" not in said[0]
            if file.name != "complete.json":  # a flipped bit there can make another file's entry wrong
                assert str(file) in said[0], (name, what, said)
    assert tried >= 12 * len(files)


@pytest.mark.parametrize("pick", range(4))
def test_a_run_goes_on_from_the_newest_good_one(
    pick: int,
    saved: Path,
    make_config: MakeConfig,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Callable[[Outcome, Outcome], None],
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    shutil.copytree(saved, out)
    newest = max(out.glob("checkpoints/step-*"))
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    file = files[pick % len(files)]
    _flip(file, random.Random(pick).randrange(8 * file.stat().st_size))
    console = Console(record=True, width=500, quiet=False, file=(tmp_path / "said").open("w", encoding="utf-8"))
    train(make_config({"out": str(out)}), console)
    said = console.export_text()
    assert "looking for an older checkpoint" in said
    assert "goes on after step 9 of 12" in said
    assert_same_bits(outcome(out), outcome(saved))


@pytest.mark.parametrize("stride", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_every_single_bit_of_the_marker(stride: int, tmp_path: Path) -> None:
    state = {"tokens": 64, "shape": {}, "block": {}, "data_fingerprint": "ab"}
    path = save_checkpoint(tmp_path, Checkpoint(1, {"w": torch.ones(2)}, {"w:step": torch.ones(1)}, state), keep=1)
    marker = path / "complete.json"
    good = marker.read_bytes()
    for bit in range(0, 8 * len(good), stride):
        _flip(marker, bit)
        with pytest.raises(EntasisError) as caught:
            verify_checkpoint(path)
            pytest.fail(f"bit {bit} makes no difference")
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        marker.write_bytes(good)
    assert load_checkpoint(path).step == 1


def test_damage_to_each_file_of_the_data_in_turn(small_data: Path, tmp_path: Path) -> None:
    """What opening does not see, the check of everything does: shards, starts of documents, tokenizer."""
    files = [path.relative_to(small_data) for path in sorted(small_data.rglob("*")) if path.is_file()]
    shards = [name for name in files if name.suffix == ".npy"]
    assert len(shards) >= 4
    source, folder = random.Random(5), tmp_path / "data"
    for name in shards:
        for what, damage in _damages(small_data / name, source):
            shutil.copytree(small_data, folder)
            damage(folder / name)
            with pytest.raises(EntasisError) as caught:
                TokenData.open(folder).verify()
                pytest.fail(f"{name}: {what} makes no difference")
            assert str(folder / name) in str(caught.value), (name, what)
            assert "\n" not in str(caught.value)
            shutil.rmtree(folder)


def test_a_token_out_of_range_stops_a_run_with_file_and_offset(
    small_data: Path, make_config: MakeConfig, quiet: Console, tmp_path: Path
) -> None:
    shutil.copytree(small_data, tmp_path / "data")
    shard = min((tmp_path / "data").glob("train-0*.npy"))
    _flip(shard, 8 * shard.stat().st_size - 8 * 301)  # the high byte of a token somewhere in the middle
    content = bytearray(shard.read_bytes())
    content[-301] = 0xFF
    shard.write_bytes(bytes(content))
    with pytest.raises(EntasisError, match=rf"{shard}: token \d+ is \d+, outside the vocabulary of 257") as caught:
        train(make_config({"data.path": str(tmp_path / "data")}), quiet)
    assert "\n" not in str(caught.value)
