"""The tensors of a model that is cut among ranks, as files: each rank writes its parts, in safetensors.

torch.distributed.checkpoint divides the work and says in each file's header, as JSON, where its parts belong. Its usual
storage keeps a pickled `.metadata` beside the parts; this one has none, so that nothing is ever unpickled.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from entasis.errors import EntasisError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PREFIX = "shard-"
"""Of the names of these files."""


def write_parts(folder: Path, tensors: Mapping[str, Tensor], group: ProcessGroup | None) -> None:
    """Writes what this rank holds of `tensors`; all ranks of `group` call it together. What several hold, one writes.

    Raises:
        OSError: the disk refuses what a rank writes.
        EntasisError: a rank cannot write for another reason.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        save(dict(tensors), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        for rank, (failure, _) in sorted(error.failures.items()):
            if isinstance(failure, OSError):
                raise OSError(failure.errno, f"rank {rank}: {failure.strerror or failure}") from None
        raise EntasisError(_first_failure(folder, error.failures)) from None


def read_parts(folder: Path) -> dict[str, Tensor]:
    """Puts the whole tensors together, in this process alone, however many ranks wrote them.

    Raises:
        EntasisError: a file is damaged or altered, or parts are missing.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    try:
        stored = cast(dict[str, TensorStorageMetadata], reader.read_metadata().state_dict_metadata)
        for name, entry in stored.items():
            parts = sum(math.prod(part.sizes) for part in entry.chunks)
            if parts != math.prod(entry.size) or any(at < 0 for part in entry.chunks for at in part.offsets):
                raise EntasisError(
                    f"{folder}: the parts of {name} do not make up the whole; files are missing or altered"
                )
        tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*single process")  # which is what is wanted
            load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise EntasisError(_first_failure(folder, error.failures)) from None
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise EntasisError(f"{folder}: its parts cannot be read ({error}); the files were altered") from None
    return tensors


def _first_failure(folder: Path, failures: Mapping[int, tuple[BaseException, object]]) -> str:
    rank, (error, _) = min(failures.items())
    return f"{folder}: rank {rank} failed ({' '.join(str(error).split())})"
