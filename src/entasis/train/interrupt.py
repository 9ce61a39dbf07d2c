"""Stopping on a signal: the step in hand is finished, the state saved, and only then does the run leave."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from entasis.errors import EntasisError


class Interrupted(EntasisError):  # noqa: N818 - it is what happened, and not a fault
    """The run was asked to stop, and its state is saved."""


class StopRequest:
    """Notes the first SIGINT or SIGTERM; a second one has its usual effect. A context manager around the steps."""

    def __init__(self) -> None:
        self.name: str | None = None
        """The signal that came, or None."""
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, _: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned, it takes
        self._previous = {}
