"""Training the runs of a study: one after another in this process, or several at once in processes of their own.

A run is the same either way. What a worker has trained lies in its run folder, so nothing but the outcome comes back.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from rich.console import Console

from entasis.errors import ConfigError, EntasisError
from entasis.run.checkpoint import NonFiniteError
from entasis.run.config import RunConfig, parse_config
from entasis.run.folder import RunFolder
from entasis.settings import parse_yaml
from entasis.train.interrupt import FROM_SCHEDULERS, Interrupted, Preempted, StopRequest
from entasis.train.loop import train

_PROTOCOL = ("steps", "evaluate_every", "evaluate_tokens")
"""Settings of `train` that may change when one run goes on, but not between the runs of a study."""
_LISTEN_SECONDS = 0.2
"""How long a signal may go unnoticed while workers train."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run to train."""

    config: RunConfig
    label: str
    """What the run is called in messages."""


def train_jobs(
    jobs: Sequence[Job], console: Console, *, workers: int = 1
) -> Iterator[tuple[int, NonFiniteError | None]]:
    """Trains every job to its end, unless it is finished; `workers` at once.

    Yields:
        The number of each job that ended, in the order in which they end: with None, or with the error of a run that
        diverged. A caller that leaves early stops the others; they are saved.

    Raises:
        ConfigError: a folder holds a run that was trained or evaluated otherwise.
        Interrupted: a signal asked to stop; the state of every run is saved. Preempted, where a scheduler sent it.
        EntasisError: a run failed; the line names it.
    """
    if workers == 1:
        for number, job in enumerate(jobs):
            yield number, _divergence(job, _outcome(job, console))
        return
    waiting = deque(enumerate(jobs))
    with StopRequest() as stop:
        crew = [_Worker() for _ in range(min(workers, len(jobs)))]
        try:
            while waiting or any(worker.job for worker in crew):
                for worker in crew:
                    if worker.job is None and waiting:
                        worker.give(*waiting.popleft())
                busy = {worker.connection: worker for worker in crew if worker.job}
                ended = wait(list(busy), _LISTEN_SECONDS)
                if stop.name:  # before what has ended: a scheduler's signal may have gone to the workers as well
                    raise stop.stopped("every run is saved")
                for connection in ended:
                    assert isinstance(connection, Connection)
                    number, job, outcome = busy[connection].take()
                    yield number, _divergence(job, outcome)
        finally:
            _dismiss(crew)


def share_cores(config: RunConfig, workers: int) -> RunConfig:
    """The configuration of one of `workers` runs that are trained at once: where it leaves the number of CPU threads
    open, an equal part of the cores that this process may use."""
    if workers == 1 or config.train.threads != "auto":
        return config
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return config.model_copy(update={"train": config.train.model_copy(update={"threads": max(1, cores // workers)})})


def _outcome(job: Job, console: Console) -> Exception | None:
    """Trains one job; the error that it ended with. What asked it to stop is raised."""
    try:
        _require_protocol(job.config)
        train(job.config, console, label=job.label)
    except Interrupted:
        raise
    except Exception as error:  # whatever it is, the study's process has to know it
        return error
    return None


def _divergence(job: Job, outcome: Exception | None) -> NonFiniteError | None:
    """The error of a run that diverged, for the caller to judge, with the run's name; every other error is raised."""
    if isinstance(outcome, NonFiniteError):
        return NonFiniteError(f"{job.label}: {outcome}")
    if outcome is not None:
        raise outcome
    return None


def _require_protocol(config: RunConfig) -> None:
    folder = RunFolder(Path(config.out))
    if not folder.config_file.exists():
        return
    before = folder.read_config().train
    for name in _PROTOCOL:
        was, now = getattr(before, name), getattr(config.train, name)
        if was != now:
            raise ConfigError(
                f"train.{name}: the study has a run with {was} ({folder.path}), and now it is {now}; such runs "
                "cannot be compared: set it back, or choose another `out`"
            )


class _Worker:
    """A process that trains one job after the other."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process that has used torch's threads hangs
        self.connection, theirs = context.Pipe()
        # Nothing is ever sent through this one: it ends when this process does, however that comes about.
        lifeline, self._alive = context.Pipe(duplex=False)
        self.process: BaseProcess = context.Process(target=_work, args=(theirs, lifeline), daemon=True)
        self.process.start()
        theirs.close()
        lifeline.close()
        self.job: tuple[int, Job] | None = None
        """The job in hand, with its number."""

    def give(self, number: int, job: Job) -> None:
        """Starts a job.

        Raises:
            EntasisError: the process is gone.
        """
        self.job = (number, job)
        try:
            self.connection.send((job.config.to_yaml(), job.label))
        except ConnectionError:
            raise self._gone(job) from None

    def take(self) -> tuple[int, Job, Exception | None]:
        """The job in hand, which has ended, and the error that it ended with.

        Raises:
            EntasisError: the process is gone.
        """
        assert self.job is not None
        (number, job), self.job = self.job, None
        try:
            outcome: Exception | None = self.connection.recv()
        except (EOFError, ConnectionError):
            raise self._gone(job) from None
        return number, job, outcome

    def _gone(self, job: Job) -> EntasisError:
        self.process.join()
        if -(self.process.exitcode or 0) in FROM_SCHEDULERS:  # it got the signal before this process did
            return Preempted(f"{job.label}: stopped by a signal; what is saved is kept; the same command goes on")
        return EntasisError(
            f"{job.label}: its worker process ended (exit status {self.process.exitcode}; out of memory?); "
            "finished runs are kept, and the same command goes on from there"
        )


def _dismiss(crew: Iterable[_Worker]) -> None:
    """Ends the workers; a run in hand is saved first."""
    for worker in crew:
        worker.process.terminate()
    for worker in crew:
        worker.process.join()
        worker.connection.close()


def _work(connection: Connection, lifeline: Connection) -> None:
    """What a worker process does until it is told to end."""
    os.setpgrp()  # the terminal's interrupt goes to the study alone, which then asks its workers once
    threading.Thread(target=_leave_with, args=(lifeline,), daemon=True).start()
    console = Console(force_terminal=False)  # several progress bars would write over each other
    while True:
        text, label = connection.recv()
        # Parsed anew, not unpickled: that also loads the plugins, whose families this process does not know yet.
        job = Job(parse_config(parse_yaml(text, label)), label)
        try:
            connection.send(_outcome(job, console))
        except Interrupted as stopped:  # by the study, which listens no more, or by whoever signals all processes
            with suppress(ConnectionError):
                connection.send(stopped)
            return


def _leave_with(lifeline: Connection) -> None:
    """Ends this process when the study's is gone: a run that nobody asks for must not hold its folder."""
    try:
        lifeline.recv()
    except (EOFError, OSError):
        os._exit(1)
