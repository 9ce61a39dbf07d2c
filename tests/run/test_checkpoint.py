"""Checkpoints are complete or absent, checked when read, and the last good one is never lost."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from entasis.errors import EntasisError
from entasis.run import checkpoint as module
from entasis.run.checkpoint import (
    Checkpoint,
    NonFiniteError,
    load_checkpoint,
    load_newest,
    remove_leftovers,
    save_checkpoint,
    verify_checkpoint,
)
from entasis.run.files import write_json

InChild = Callable[..., int]


def _made(step: int) -> Checkpoint:
    weights = torch.Generator().manual_seed(step)
    return Checkpoint(
        step=step,
        model={
            "embed.weight": torch.randn(7, 5, generator=weights),
            "turned": torch.randn(3, 4, generator=weights).T,
            "norm": torch.randn(5, generator=weights),
        },
        optimizer={"norm:exp_avg": torch.randn(5, generator=weights), "norm:step": torch.tensor(float(step))},
        state={
            "tokens": 64 * step,
            "shape": {"layers": [{"width": 5}], "embed_width": 5},
            "data_fingerprint": "ab",
            "block": {},
        },
    )


def _assert_equal(left: Checkpoint, right: Checkpoint) -> None:
    assert (left.step, left.state) == (right.step, right.state)
    for these, those in ((left.model, right.model), (left.optimizer, right.optimizer)):
        assert these.keys() == those.keys()
        assert all(torch.equal(tensor, those[name]) for name, tensor in these.items())


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_comes_back_as_it_was(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "deep" / "checkpoints", _made(12), keep=2)
    assert path.name == "step-00000012"
    _assert_equal(load_checkpoint(path), _made(12))
    newest = load_newest(path.parent, pytest.fail)
    assert newest is not None
    _assert_equal(newest, _made(12))


def test_none_without_any(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "nowhere", pytest.fail) is None
    (tmp_path / "checkpoints").mkdir()
    assert load_newest(tmp_path / "checkpoints", pytest.fail) is None


def test_holds_nothing_pickled(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, _made(1), keep=1)
    assert _names(path) == ["complete.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    for file in path.iterdir():
        content = file.read_bytes()
        if file.suffix == ".safetensors":  # eight bytes of length, then JSON, then plain numbers
            content = content[8 : 8 + int.from_bytes(content[:8], "little")]
        assert isinstance(json.loads(content), dict)


def test_newest_are_kept_in_the_order_of_steps(tmp_path: Path) -> None:
    for step in (9, 10, 11, 99_999_999, 100_000_000):
        save_checkpoint(tmp_path, _made(step), keep=3)
    assert set(_names(tmp_path)) == {"step-00000011", "step-99999999", "step-100000000"}
    newest = load_newest(tmp_path, pytest.fail)
    assert newest is not None
    assert newest.step == 100_000_000


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-2])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-2] ^= 0x10
    file.write_bytes(bytes(content))


def _flip_early_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[9] ^= 1
    file.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [_truncate, _empty, _flip_bit, _flip_early_bit, Path.unlink])
@pytest.mark.parametrize("file", ["complete.json", "model.safetensors", "optimizer.safetensors", "state.json"])
def test_damage_is_found_said_and_passed_over(file: str, damage: Callable[[Path], None], tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, _made(step), keep=2)
    damage(tmp_path / "step-00000002" / file)
    said: list[str] = []
    found = load_newest(tmp_path, said.append)
    assert found is not None
    _assert_equal(found, _made(1))
    assert len(said) == 1
    assert str(tmp_path / "step-00000002" / file) in said[0]
    assert "looking for an older checkpoint" in said[0]
    assert "\n" not in said[0]

    damage(tmp_path / "step-00000001" / file)
    with pytest.raises(EntasisError, match="all 2 checkpoints are damaged") as caught:
        load_newest(tmp_path, said.append)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "marker", ["", "nonsense", "[]", "null", "{}", '{"files": []}', '{"files": {"state.json": 3}}', '{"files": {}}']
)
def test_a_broken_marker_is_damage(marker: str, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, _made(1), keep=1)
    (path / "complete.json").write_text(marker, encoding="utf-8")
    with pytest.raises(EntasisError):
        verify_checkpoint(path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, _made(1), keep=1)
    marker = json.loads((path / "complete.json").read_text(encoding="utf-8"))
    write_json(path / "complete.json", {**marker, "format": "entasis-checkpoint-9"})
    with pytest.raises(EntasisError, match="format entasis-checkpoint-9, expected entasis-checkpoint-1"):
        load_checkpoint(path)


def test_a_damaged_later_one_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    """The run went on from step 4, since step 8 is damaged, and now saves at step 6."""
    for step in (4, 8):
        save_checkpoint(tmp_path, _made(step), keep=2)
    _flip_bit(tmp_path / "step-00000008" / "model.safetensors")
    save_checkpoint(tmp_path, _made(6), keep=1)
    said: list[str] = []
    found = load_newest(tmp_path, said.append)
    assert found is not None
    _assert_equal(found, _made(6))
    save_checkpoint(tmp_path, _made(8), keep=1)
    assert _names(tmp_path) == ["step-00000008"]
    _assert_equal(load_checkpoint(tmp_path / "step-00000008"), _made(8))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_never_saved_and_removes_nothing(value: float, tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, _made(step), keep=2)
    before = _names(tmp_path)
    broken = _made(3)
    broken.model["norm"][2] = value
    with pytest.raises(NonFiniteError, match="step 3: weight norm is not finite"):
        save_checkpoint(tmp_path, broken, keep=1)
    assert _names(tmp_path) == before


# --- kills ------------------------------------------------------------------------------------------------------------

_CALLS: tuple[tuple[Any, str], ...] = (
    (os, "mkdir"),
    (module, "save_file"),
    (os, "fsync"),
    (os, "rename"),
    (os, "replace"),
    (os, "unlink"),
    (os, "rmdir"),
)


def _watch(patch: pytest.MonkeyPatch, wanted: int, seen: list[str], *, after: bool) -> None:
    """SIGKILL before or after the `wanted`-th call that touches the disk; a file of tensors is left half written."""
    for where, name in _CALLS:
        original = getattr(where, name)

        def wrapped(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
            seen.append(name)
            if len(seen) == wanted:
                try:
                    if name == "save_file":
                        Path(args[1]).write_bytes(b"\x40\0\0\0\0\0\0\0{")
                    elif after:
                        original(*args, **kwargs)
                finally:
                    os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        patch.setattr(where, name, wrapped)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_every_place_of_a_save(
    after: bool, in_child: InChild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fresh(name: str) -> Path:
        """Two good checkpoints, and a damaged one of the step that will be saved."""
        folder = tmp_path / name
        for step in (1, 2, 3):
            save_checkpoint(folder, _made(step + 10), keep=3)
        _flip_bit(folder / "step-00000013" / "model.safetensors")
        return folder

    seen: list[str] = []
    folder = fresh("counted")
    with monkeypatch.context() as patch:
        _watch(patch, 0, seen, after=after)
        save_checkpoint(folder, _made(13), keep=2)
    assert set(seen) == {name for _, name in _CALLS}
    assert len(seen) > 20
    renamed = len(seen) - 1 - seen[::-1].index("rename")  # the rename that begins the removal of an old one
    for place in range(1, len(seen) + 1):
        folder = fresh(f"killed at {place}")
        with monkeypatch.context() as patch:
            _watch(patch, place, [], after=after)
            assert in_child(lambda folder=folder: save_checkpoint(folder, _made(13), keep=2)) == -signal.SIGKILL
        found = load_newest(folder, lambda _: None)
        assert found is not None
        assert found.step == (13 if place > renamed else found.step)
        _assert_equal(found, _made(found.step))
        assert found.step in (12, 13)
        save_checkpoint(folder, _made(13), keep=2)
        save_checkpoint(folder, _made(14), keep=2)
        assert _names(folder) == ["step-00000013", "step-00000014"]
        for step in (13, 14):
            _assert_equal(load_checkpoint(folder / f"step-{step:08d}"), _made(step))


def test_leftovers_can_be_removed_without_saving(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, _made(1), keep=1)
    for name in (".step-00000002.tmp", ".step-00000000.old.tmp"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    remove_leftovers(tmp_path)
    assert _names(tmp_path) == ["step-00000001"]
    remove_leftovers(tmp_path / "nowhere")


# --- a disk that refuses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "name"), [(os, "mkdir"), (module, "save_file"), (os, "fsync"), (os, "replace"), (os, "rename")]
)
@pytest.mark.parametrize("number", [28, 30, 13], ids=["full", "read-only", "no permission"])
def test_a_disk_that_refuses_gives_one_line_and_keeps_the_older_ones(
    where: Any, name: str, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, _made(step), keep=2)
    before = _names(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "some file")

    with monkeypatch.context() as patch:
        patch.setattr(where, name, refuse)
        with pytest.raises(EntasisError, match=os.strerror(number)) as caught:
            save_checkpoint(tmp_path, _made(3), keep=1)
    assert "step-00000003: cannot be written" in str(caught.value)
    assert "the older checkpoints are kept" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert _names(tmp_path) == before, "what was half written is removed"
    _assert_equal(load_checkpoint(tmp_path / "step-00000002"), _made(2))
    save_checkpoint(tmp_path, _made(3), keep=1)
    assert _names(tmp_path) == ["step-00000003"]


def test_a_file_that_the_system_refuses_to_grow(in_child: InChild, tmp_path: Path) -> None:
    """A true failed write, by a limit on the size of files: what safetensors raises is told in one line as well."""
    for step in (1, 2):
        save_checkpoint(tmp_path, _made(step), keep=2)
    big = _made(3)
    big.model["norm"] = torch.zeros(40_000)

    def save() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, 65_536))
        with pytest.raises(EntasisError, match="cannot be written") as caught:
            save_checkpoint(tmp_path, big, keep=1)
        assert "\n" not in str(caught.value)

    assert in_child(save) == 0
    assert _names(tmp_path) == ["step-00000001", "step-00000002"]
