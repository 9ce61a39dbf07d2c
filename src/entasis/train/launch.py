"""Starting several processes on this machine that train one run together, with torchrun's own launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence

from entasis.errors import EntasisError
from entasis.run.config import RunConfig
from entasis.train.interrupt import FROM_SCHEDULERS, REQUEUE, Interrupted, Preempted
from entasis.train.ranks import Ranks

_LEAVE_SECONDS = 600
"""What ranks have after a signal, to finish the step in hand and save, before they are killed."""
_LOOK_SECONDS = 1.0
_LAUNCHER = "ENTASIS_LAUNCHER"
"""In the environment of the ranks: the process that started them."""


class FailedRankError(EntasisError):
    """A rank failed; its own line says why. Leaves with the rank's exit status."""


def launch(config: RunConfig, arguments: Sequence[str], processes: int, *, max_restarts: int = 0) -> None:
    """Runs `entasis` with `arguments` in so many processes, as ranks of one group; returns when all are done.

    A signal is passed on to them once, and they are waited for. Where one fails, all start again together from the
    newest good checkpoint, at most `max_restarts` times.

    Raises:
        ConfigError: the batch of `config` cannot be shared among them.
        FailedRankError: a rank failed, and the others were ended; the line names it.
        Interrupted: a signal asked to stop. Preempted, where a scheduler sent it, to this process or to a rank.
    """
    Ranks(size=processes).share(config)
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in list(logging.root.manager.loggerDict):  # each has its own level, and logs a page for every failure
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ[_LAUNCHER] = str(os.getpid())
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_LEAVE_SECONDS))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost rank has its line; torch's warnings hide it
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    with tempfile.TemporaryDirectory(prefix="entasis-ranks-") as logs:
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            elastic_launch(settings, sys.executable)("-m", "entasis", *arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            status = failure.exitcode
            if status == REQUEUE:  # where one is asked to stop, all do, and whose status comes first is chance
                raise Preempted(
                    f"a scheduler's signal to one of {processes} ranks stopped all; what is saved is kept, and the "
                    "same command goes on from there"
                ) from None
            how = f"exit status {status}" if status > 0 else f"it was killed by {signal.Signals(-status).name}"
            failed = FailedRankError(f"rank {rank} of {processes} failed ({how}); the others were ended")
            failed.exit_status = status if status > 0 else 1
            raise failed from None
        except SignalException as error:
            kind = Preempted if error.sigval in FROM_SCHEDULERS else Interrupted
            raise kind(
                f"stopped by {error.sigval.name}: the {processes} ranks were asked to save and have left; the same "
                "command goes on from there"
            ) from None


def stop_without_launcher() -> None:
    """In a rank that `launch` started: asks the run to stop and save, as a scheduler would, when the launcher is gone.

    Killed outright, it cannot end the ranks, and they would hold their GPUs and the run's folder.
    """
    launcher = os.environ.get(_LAUNCHER)
    if launcher != str(os.getppid()):
        return

    def watch() -> None:
        while str(os.getppid()) == launcher:
            time.sleep(_LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
