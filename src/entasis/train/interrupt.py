"""Stopping on a signal: the step in hand is finished, the state saved, and only then does the run leave.

SIGINT is a person's Ctrl-C, SIGHUP a terminal that is closed. SIGTERM and SIGUSR1 are what schedulers send before they
take a machine away or a time limit ends; after them the exit status says that the same command, started again, goes on.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from entasis.errors import EntasisError

REQUEUE = 75
"""Exit status: stopped by a scheduler; what was done is saved, and the same command goes on (EX_TEMPFAIL)."""
FROM_SCHEDULERS = (signal.SIGTERM, signal.SIGUSR1)


class Interrupted(EntasisError):  # noqa: N818 - it is what happened, and not a fault
    """The run was asked to stop, and its state is saved."""


class Preempted(Interrupted):
    """A scheduler asked it, so that the exit status asks for another start."""

    exit_status = REQUEUE


class StopRequest:
    """Notes the first signal; a second Ctrl-C has its usual effect. A context manager around the steps.

    Schedulers repeat themselves, and send SIGTERM after SIGUSR1; what they mean for certain is SIGKILL. So further ones
    of theirs do not cut off the saving.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        """The signal that came, or None."""
        self._previous: dict[signal.Signals, object] = {}
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in (signal.SIGINT, signal.SIGHUP, *FROM_SCHEDULERS):
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:  # as nohup asks
                    continue
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore(*self._previous)

    def stopped(self, what: str) -> Interrupted:
        """The error to leave with, once `what`, in words, is saved."""
        kind = Preempted if self.name in {each.name for each in FROM_SCHEDULERS} else Interrupted
        return kind(f"stopped by {self.name}: {what}; the same command goes on from there")

    def _note(self, number: int, _: FrameType | None) -> None:
        self.name = self.name or signal.Signals(number).name
        self._restore(signal.SIGINT)
        if number == signal.SIGHUP:  # what is written to a terminal that is gone fails, and would end the saving
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for descriptor in self._terminals:
                os.dup2(nowhere, descriptor)
            os.close(nowhere)

    def _restore(self, *numbers: signal.Signals) -> None:
        for number in set(numbers) & self._previous.keys():
            signal.signal(number, self._previous.pop(number))  # type: ignore[arg-type]  # what it returned, it takes


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Outside the steps, a scheduler's signal ends the command at once, with the status that asks for another start.

    Nothing is in hand then that is not saved or made again. Raised is SystemExit, which no `except Exception` takes for
    a damaged file.
    """
    own = os.getpid()

    def leave(number: int, _: FrameType | None) -> None:
        if os.getpid() != own:  # a forked process is not the command
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        name = signal.Signals(number).name
        print(f"error: stopped by {name}: what is saved is kept; the same command goes on from there", file=sys.stderr)
        raise SystemExit(REQUEUE)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, leave) for number in FROM_SCHEDULERS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
