"""What a person sees of a run, and what is written of it: metrics, log, progress bar."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from entasis.errors import EntasisError
from entasis.run.folder import RunFolder

_RECENT_STEPS = 20


class Throughput:
    """Tokens per second of the steps alone: evaluation and saving are not in it."""

    def __init__(self, tokens_per_step: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._tokens = tokens_per_step
        self._clock = clock
        self._started = clock()

    def start(self) -> None:
        """A step begins."""
        self._started = self._clock()

    def stop(self) -> float:
        """The step is done; its tokens per second."""
        return self._tokens / max(self._clock() - self._started, 1e-9)


class _Line(ProgressColumn):
    """One text, the most wanted first, so that a narrow terminal cuts off the rest."""

    def render(self, task: Task) -> Text:
        """`label  step/steps  time left  numbers`."""
        left = "-:--:--" if task.time_remaining is None else str(timedelta(seconds=int(task.time_remaining)))
        parts = (task.description, f"{task.completed:.0f}/{task.total:.0f}", f"{left} left", task.fields["numbers"])
        return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")


class Monitor:
    """Reports one run to its folder and to the terminal; a context manager around the run's steps."""

    def __init__(
        self,
        folder: RunFolder,
        console: Console,
        *,
        label: str,
        step: int,
        steps: int,
        flops_per_token: int,
        peak: tuple[float, str] | None,
    ) -> None:
        self._folder = folder
        self._console = console
        self._label = label
        self._peak = peak
        self._flops_per_token = flops_per_token
        self._recent: list[float] = []
        self._train_loss = math.nan
        self._val_loss: float | None = None
        self._progress = Progress(
            BarColumn(bar_width=20),
            _Line(table_column=Column(no_wrap=True)),  # so that the bar gives way first
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(label, total=steps, completed=step, numbers="")

    def __enter__(self) -> Monitor:
        self._progress.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._progress.stop()
        if isinstance(error, EntasisError):
            with suppress(OSError):  # on a full disk, what filled it is the error to show
                self._folder.log(str(error))

    def step(self, record: dict[str, Any]) -> None:
        """A step is done: its record goes to the metrics, its numbers to the progress bar."""
        self._folder.append_metrics(record)
        self._recent = [*self._recent[1 - _RECENT_STEPS :], record["tokens_per_second"]]
        self._train_loss = record.get("train_loss", self._train_loss)  # a step that was left out has none
        if "val_loss" in record:
            self._val_loss = record["val_loss"]
            line = f"step {record['step']}: train loss {self._train_loss:.4f}, held-out loss {self._val_loss:.4f}"
            self._folder.log(line)
            if not self._console.is_terminal:  # no bar there, but a cluster's log should show progress
                self._console.print(f"{self._label}: {line}", markup=False, highlight=False, soft_wrap=True)
        numbers = f"loss {self._train_loss:.3f}  {self.rate:,.0f} tokens/s"
        numbers += f"  {self._utilisation()}" if self._peak else ""
        numbers += "" if self._val_loss is None else f"  held-out {self._val_loss:.3f}"
        self._progress.update(self._task, completed=record["step"], numbers=numbers)

    @property
    def rate(self) -> float:
        """Tokens per second, the median of the last steps."""
        return median(self._recent)

    def speed(self, peak_bytes: int | None) -> str:
        """The last steps in a line: tokens per second, MFU where the device's peak is known, and peak memory."""
        parts = [f"{self.rate:,.0f} tokens/s"]
        parts += [self._utilisation()] if self._peak else []
        parts += [] if peak_bytes is None else [f"{peak_bytes / 2**30:.2f} GiB at most"]
        return ", ".join(parts)

    def _utilisation(self) -> str:
        """Model-FLOPs utilisation (forward and backward as three forward passes) with the peak that it refers to."""
        assert self._peak is not None
        peak, name = self._peak
        return f"MFU {3 * self._flops_per_token * self.rate / peak:.0%} of {name}"
