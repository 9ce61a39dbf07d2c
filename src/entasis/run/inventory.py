"""The checkpoints that a run holds, whether they are whole, and one of them as a single file."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

from entasis.errors import EntasisError, StorageError
from entasis.run.checkpoint import load_checkpoint, saved_checkpoints, step_of, verify_checkpoint
from entasis.run.files import sync_file


@dataclass(frozen=True, slots=True)
class HeldCheckpoint:
    """One checkpoint as it lies on the disk."""

    path: Path
    step: int
    bytes: int
    parts: int
    """Files that hold a share of the model each; 0: model and optimizer are a file each."""
    fault: str | None
    """What is wrong with it, in a line; None: every file is as it was written."""


def held_checkpoints(path: Path) -> list[HeldCheckpoint]:
    """The checkpoints in a run folder, oldest first, every file compared with its checksum; or the one at `path`.

    Raises:
        EntasisError: there is no such folder, or no checkpoint in it.
    """
    if not path.is_dir():
        raise EntasisError(f"{path}: no such folder; name a run folder or a checkpoint in one")
    inside = path / "checkpoints"
    path = path.absolute()  # a name is needed also of "."
    itself = path in saved_checkpoints(path.parent)
    found = [path] if itself else saved_checkpoints(inside if inside.is_dir() else path)
    if not found:
        raise EntasisError(f"{path}: holds no checkpoint")
    return [_held(checkpoint) for checkpoint in found]


def single_file(path: Path, out: Path) -> tuple[int, int, list[HeldCheckpoint]]:
    """Writes the weights of a checkpoint, or of a run's newest good one, into one safetensors file.

    Gives their number, the step, and newer checkpoints that are damaged and were passed over.
    Step, tokens, shape and block stand in the file's header as JSON texts. `out` is whole or not there.

    Raises:
        EntasisError: the checkpoint is damaged, `out` exists, or the disk refuses.
    """
    held = held_checkpoints(path)
    good = [checkpoint for checkpoint in held if checkpoint.fault is None]
    if not good:
        raise EntasisError(f"{held[-1].fault}; nothing is written")
    if out.exists():
        raise EntasisError(f"{out}: exists; choose another name, or remove it")
    checkpoint = load_checkpoint(good[-1].path)
    about = {"step": checkpoint.step, **checkpoint.state}
    header = {"format": "pt", **{name: json.dumps(about[name]) for name in ("step", "tokens", "shape", "block")}}
    temporary = None
    try:
        descriptor, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
        os.close(descriptor)
        temporary = Path(name)
        save_file(checkpoint.model, temporary, header)
        temporary.chmod(0o644)
        sync_file(temporary)
        temporary.rename(out)
    except OSError as error:
        raise StorageError(f"{out}: cannot be written ({error.strerror or error})") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    passed_over = [other for other in held if other.step > checkpoint.step]
    return sum(tensor.numel() for tensor in checkpoint.model.values()), checkpoint.step, passed_over


def _held(path: Path) -> HeldCheckpoint:
    fault = None
    try:
        verify_checkpoint(path)
    except EntasisError as error:
        fault = str(error)
    files = [file for file in path.iterdir() if file.is_file()]
    return HeldCheckpoint(
        path=path,
        step=step_of(path),
        bytes=sum(file.stat().st_size for file in files),
        parts=sum(file.name.startswith("shard-") for file in files),
        fault=fault,
    )
