"""Checkpoints: complete or absent, nothing pickled, checked when read.

    step-00000120/
        model.safetensors       the weights
        optimizer.safetensors   what the optimizer steps on, by parameter name
        state.json              step, tokens, shape, block, fingerprint of the data
        complete.json           written last: the size and SHA-256 of every other file

Ranks among which a model is cut write their parts of both in files of their own, `shard-...safetensors`.

A checkpoint is written under a temporary name in the same folder, forced to the disk and renamed, and it is renamed
before it is removed. So a folder of this name is complete, whenever the process was killed; one without a readable
`complete.json` was damaged afterwards.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from entasis.errors import EntasisError, StorageError
from entasis.run.files import sync_file, sync_folder, write_json
from entasis.run.parts import own
from entasis.run.sharded import PREFIX, read_parts, write_parts
from entasis.settings import shorten

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FORMAT = "entasis-checkpoint-1"
_MARKER = "complete.json"
_STATE_FIELDS = {"step": int, "tokens": int, "shape": dict, "block": dict, "data_fingerprint": str}
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
_NAME = re.compile(r"step-(\d{8,})")
_PART = re.compile(PREFIX + r"[\w-]+\.safetensors")


class NonFiniteError(EntasisError):
    """A loss, gradient or weight is not finite."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's content, on the CPU."""

    step: int
    """Optimizer steps taken."""
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    """Plain data: what the run must agree with to go on."""


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Writes a checkpoint into `folder` and removes all but the newest `keep` up to this step.

    One of a later step was damaged, since the run went on from an earlier one; it must not push out a good one.

    Raises:
        NonFiniteError: a weight is not finite; nothing is written and nothing removed.
        StorageError: the disk refuses; the older checkpoints are kept.
    """
    refuse_non_finite(checkpoint)
    final = folder / f"step-{checkpoint.step:08d}"
    temporary = folder / f".{final.name}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        _write(temporary, checkpoint)
        if final.exists():  # a damaged checkpoint of this step
            _remove(final)
        temporary.rename(final)
        sync_folder(folder)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise StorageError(
            f"{final}: cannot be written ({reason}); the older checkpoints are kept; make room or mend the rights, "
            "and start the same command again"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # what a failed save wrote must not fill the disk
    _prune(folder, checkpoint.step, keep)
    return final


def save_parts(
    folder: Path,
    checkpoint: Checkpoint,
    keep: int,
    *,
    first: bool,
    together: Callable[[], AbstractContextManager[None]],
    group: ProcessGroup | None = None,
) -> None:
    """As `save_checkpoint`, of a model that is cut among ranks; all of them call it, and share the folder's disk.

    Args:
        folder: of the checkpoints.
        checkpoint: what this rank holds.
        keep: how many checkpoints stay.
        first: whether this rank makes the folder, and says at the end that it is complete.
        together: around what a rank may fail at alone: none goes on before all are done, or if one failed.
        group: of these ranks; the default one if None.

    Raises:
        NonFiniteError: a weight is not finite; nothing is written and nothing removed.
        EntasisError: the disk refuses; the older checkpoints are kept.
    """
    final = folder / f"step-{checkpoint.step:08d}"
    temporary = folder / f".{final.name}.tmp"
    try:
        with together():
            refuse_non_finite(checkpoint)
            if first:
                folder.mkdir(parents=True, exist_ok=True)
                remove_leftovers(folder)
                temporary.mkdir()
        write_parts(temporary, {**checkpoint.model, **checkpoint.optimizer}, group)
        with together():
            if first:
                write_json(temporary / "state.json", {"step": checkpoint.step, **checkpoint.state})
                _seal(temporary)
                if final.exists():  # a damaged checkpoint of this step
                    _remove(final)
                temporary.rename(final)
                sync_folder(folder)
                _prune(folder, checkpoint.step, keep)
    except OSError as error:
        raise StorageError(
            f"{final}: cannot be written ({error.strerror or error}); the older checkpoints are kept; make room or "
            "mend the rights, and start the same command again"
        ) from None
    finally:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)


def load_newest(folder: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint whose files are as they were written; None if there is none.

    Damaged ones are passed over, and `report` is told which and why.

    Raises:
        EntasisError: there are checkpoints, and all are damaged.
    """
    candidates = saved_checkpoints(folder)
    for path in reversed(candidates):
        try:
            return load_checkpoint(path)
        except EntasisError as error:
            report(f"{error}; looking for an older checkpoint")
    if candidates:
        raise EntasisError(f"{folder}: all {len(candidates)} checkpoints are damaged; remove the folder to start anew")
    return None


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads and checks one checkpoint.

    Raises:
        EntasisError: it is not complete, or a file is missing, altered or not what it should be; names the file.
    """
    verify_checkpoint(path)
    state = _read_state(path / "state.json", step=step_of(path))
    if not (path / "model.safetensors").exists():
        tensors = read_parts(path)
        model = {name: tensor for name, tensor in tensors.items() if ":" not in name}
        optimizer = {name: tensor for name, tensor in tensors.items() if ":" in name}
        return Checkpoint(step=state.pop("step"), model=model, optimizer=optimizer, state=state)
    try:
        model, optimizer = load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors")
    except SafetensorError as error:
        raise EntasisError(f"{path}: {error}") from None
    return Checkpoint(step=state.pop("step"), model=model, optimizer=optimizer, state=state)


def verify_checkpoint(path: Path) -> None:
    """Compares every file with the marker's sizes and checksums.

    Raises:
        EntasisError: names the first file that differs.
    """
    if path.is_symlink():
        raise EntasisError(f"{path}: a link; a checkpoint is a folder, and damaged if it is not")
    if not _is_plain_file(path / _MARKER):
        raise EntasisError(f"{path / _MARKER}: missing or damaged")
    try:
        marker = json.loads((path / _MARKER).read_text(encoding="utf-8"))
        form = marker["format"]
        expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in marker["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise EntasisError(f"{path / _MARKER}: missing or damaged") from None
    if form != FORMAT:
        raise EntasisError(f"{path}: format {form}, expected {FORMAT}; it was written by another version")
    for name in expected:
        if not _PLAIN_NAME.fullmatch(name):
            raise EntasisError(f"{path / _MARKER}: {shorten(name)} is no name of a file in a checkpoint; it is damaged")
    parts = sorted(name for name in expected if _PART.fullmatch(name))
    for file in path.glob("*.safetensors"):
        if file.name not in expected:
            raise EntasisError(f"{file}: not one of the checkpoint's files; it was put there afterwards")
    for name in (*(parts or ("model.safetensors", "optimizer.safetensors")), "state.json"):
        file = path / name
        if name not in expected or not _is_plain_file(file):
            raise EntasisError(f"{file}: missing, or not a plain file")
        size, checksum = expected[name]
        if file.stat().st_size != size:
            raise EntasisError(f"{file}: {file.stat().st_size} bytes instead of {size}; the file is damaged")
        if _sha256(file) != checksum:
            raise EntasisError(f"{file}: checksum differs; the file is damaged")


def _is_plain_file(file: Path) -> bool:
    """Not a link, which can lead elsewhere, and not a pipe, on which a reader waits for ever."""
    return file.is_file() and not file.is_symlink()


def remove_leftovers(folder: Path) -> None:
    """Removes what a killed save left; the run's lock says that nobody else is writing."""
    for path in folder.glob(".step-*.tmp"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _read_state(file: Path, step: int) -> dict[str, Any]:
    """The plain data of a checkpoint, every field of its type.

    Raises:
        EntasisError: it is not what a save writes; names the file and the field.
    """
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise EntasisError(f"{file}: not JSON") from None
    for name, kind in _STATE_FIELDS.items():
        if not isinstance(state, dict) or type(state.get(name)) is not kind:
            raise EntasisError(f"{file}: {name} is not what it should be; the file was altered")
    if state["step"] != step:
        raise EntasisError(f"{file}: step {shorten(state['step'])} in the folder of step {step}; the file was altered")
    if state["tokens"] < 0:
        raise EntasisError(f"{file}: tokens is not what it should be; the file was altered")
    return dict(state)


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    """Every file of a checkpoint, on the disk when this returns; the marker last."""
    folder.mkdir()
    save_file(_contiguous(checkpoint.model), folder / "model.safetensors")
    save_file(_contiguous(checkpoint.optimizer), folder / "optimizer.safetensors")
    write_json(folder / "state.json", {"step": checkpoint.step, **checkpoint.state})
    _seal(folder)


def _seal(folder: Path) -> None:
    """Forces the files to the disk, and says which they are."""
    files = sorted(folder.iterdir())
    for path in files:
        sync_file(path)
    marker = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files}
    write_json(folder / _MARKER, {"format": FORMAT, "files": marker})
    sync_folder(folder)


def _prune(folder: Path, step: int, keep: int) -> None:
    for old in [path for path in saved_checkpoints(folder) if step_of(path) <= step][:-keep]:
        _remove(old)


def saved_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints' folders, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    assert match
    return int(match[1])


def _remove(path: Path) -> None:
    """Removes a checkpoint, under another name, so that a kill leaves a leftover and not half a checkpoint."""
    if path.is_symlink():
        path.unlink()
        return
    doomed = path.with_name(f".{path.name}.old.tmp")
    path.rename(doomed)
    shutil.rmtree(doomed)


def refuse_non_finite(checkpoint: Checkpoint) -> None:
    """Raises a NonFiniteError that names the first weight which is not finite."""
    for name, tensor in checkpoint.model.items():
        if not bool(torch.isfinite(own(tensor)).all()):
            raise NonFiniteError(
                f"step {checkpoint.step}: weight {name} is not finite; no checkpoint is written and the older ones are "
                "kept; lower optimizer.learning_rate"
            )


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
