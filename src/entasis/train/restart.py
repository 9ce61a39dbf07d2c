"""Starting again by itself: after a failure that may pass, training goes back to the newest good checkpoint."""

from __future__ import annotations

import errno
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from entasis.errors import StorageError
from entasis.run.checkpoint import NonFiniteError
from entasis.run.config import RunConfig
from entasis.run.folder import RunFolder
from entasis.train.loop import train

_MAY_PASS = {
    getattr(errno, name)
    for name in ("EAGAIN", "EBUSY", "EDQUOT", "EIO", "ENETDOWN", "ENETUNREACH", "ENOSPC", "ESTALE", "ETIMEDOUT")
    if hasattr(errno, name)
}
"""What a disk or a network file system answers today and perhaps not in a minute. A missing file stays missing."""
_LONGEST_PAUSE_SECONDS = 60


def train_with_restarts(
    config: RunConfig, console: Console, *, max_restarts: int, accept_data_change: bool = False
) -> None:
    """Trains as `train` does; goes back to the newest good checkpoint at most `max_restarts` times.

    It does so after a loss or weight that is not finite, which a fault of the hardware can cause, and after a disk that
    refuses to read or write, for which it waits 1, 2, 4 ... seconds. Each time is one line.

    Raises:
        NonFiniteError: the same step failed the same way again: the data or the settings cause it, and not the machine.
        EntasisError: as `train`, and if it failed more often.
    """
    not_finite: set[str] = set()
    restarts = 0
    while True:
        try:
            return train(config, console, accept_data_change=accept_data_change)
        except (NonFiniteError, StorageError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _MAY_PASS:
                raise
            what = str(error)
            if what in not_finite:
                raise NonFiniteError(
                    f"{what}; it came again in the same way, so that starting again does not help; "
                    f"train.skip_bad_steps={config.train.skip_bad_steps + 1} leaves such a step out"
                ) from None
            if restarts == max_restarts:
                raise
            pause = 0 if isinstance(error, NonFiniteError) else min(2**restarts, _LONGEST_PAUSE_SECONDS)
            if isinstance(error, NonFiniteError):
                not_finite.add(what)
        # Outside the handler, so that the error no longer holds the model that failed.
        restarts += 1
        line = f"starts again ({restarts} of at most {max_restarts}) after: {what}"
        with suppress(OSError):
            RunFolder(Path(config.out)).log(line)
        console.print(f"train: {line}", markup=False, highlight=False, soft_wrap=True)
        time.sleep(pause)
