"""Saving while training goes on: the state is copied at once, and a thread brings the copy to the disk.

What a checkpoint holds and when it counts does not change: it is complete or absent, whatever happens meanwhile. One is
written at a time; the next one waits for it. Where each rank holds a part of the model, each has such a thread, and
they exchange what they must in a group of their own.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from entasis.run.checkpoint import Checkpoint, refuse_non_finite, save_checkpoint, save_parts
from entasis.train.ranks import Ranks

_LOWEST_PRIORITY = 19


class Saver:
    """Writes the checkpoints of one run; a context manager around the run's steps, which waits for the last one.

    Args:
        folder: of the checkpoints.
        keep: how many of them stay.
        ranks: where each of them holds a part and all save together, their group for that; else None.
    """

    def __init__(self, folder: Path, keep: int, ranks: Ranks | None = None) -> None:
        self._folder = folder
        self._keep = keep
        self._ranks = ranks
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._join()
        if error is None:  # else that one is told, and the save is tried again when the run goes on
            self._check()

    def save(self, checkpoint: Checkpoint) -> None:
        """Copies a checkpoint, whose tensors go on changing, and begins to write the copy.

        Raises:
            NonFiniteError: a weight is not finite; nothing is written.
            EntasisError: the one before could not be written.
        """
        self.wait()
        refuse_non_finite(checkpoint)
        copy = Checkpoint(
            step=checkpoint.step,
            model=_copied(checkpoint.model),
            optimizer=_copied(checkpoint.optimizer),
            state=dict(checkpoint.state),
        )
        self._thread = threading.Thread(target=self._write, args=(copy,), name="save")
        self._thread.start()

    def wait(self) -> None:
        """Until what was begun is on the disk.

        Raises:
            EntasisError: it could not be written.
        """
        self._join()
        self._check()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _check(self) -> None:
        """Raises the error of a save that failed since the last look."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, checkpoint: Checkpoint) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own: what training leaves idle is enough
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        ranks = self._ranks
        try:
            if ranks is None:
                save_checkpoint(self._folder, checkpoint, self._keep)
                return
            first, together = ranks.first, ranks.together
            save_parts(self._folder, checkpoint, self._keep, first=first, together=together, group=ranks.group)
        except Exception as error:  # told where the run's steps are
            self._error = error


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
