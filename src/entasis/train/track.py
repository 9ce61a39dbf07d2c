"""Mirrors of metrics.jsonl for TensorBoard and Weights & Biases. The file is the truth; a mirror may fail, and is slow.

Each start of a run begins its mirrors anew, from the records that count. So they are right also after the run went back
to an older checkpoint, which trackers take badly: they drop what is not newer than their last step. Each tracker has a
thread and a queue of its own, so that one that hangs or raises costs the run one line and no time.
"""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

from entasis.run.config import RunConfig
from entasis.run.folder import RunFolder
from entasis.run.sections import TrackSection

_LONGEST_QUEUE = 10_000
_LAST_WAIT_SECONDS = 10.0
"""How long the end of a run waits for a tracker."""
_TENSORBOARD_FLUSH_SECONDS = 10
_SERVICE_SECONDS = 30.0
"""What a service that does not answer may take, also from a process that wants to end."""


class Tracker(Protocol):
    """What takes the numbers of a run."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Takes the numbers of a step; steps rise."""

    def close(self) -> None:
        """There are no more."""


class Mirrors:
    """The mirrors that a configuration asks for; a context manager around the run's steps."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, *, step: int, say: Callable[[str], None], on: bool = True
    ) -> None:
        """`step` is that of the state that the run goes on from: later records in the folder do not count."""
        makers: dict[str, Callable[[], Tracker]] = {}
        if not on:  # of several processes, one tells
            config = config.model_copy(update={"track": TrackSection()})
        if config.track.tensorboard:
            makers["tensorboard"] = lambda: _TensorBoard(folder)
        if config.track.wandb is not None:
            makers["wandb"] = lambda: _WandB(config, folder)
        self._mirrors = [_Mirror(f"track.{name}", make, folder, step, say) for name, make in makers.items()]

    def __enter__(self) -> Mirrors:
        for mirror in self._mirrors:
            mirror.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for mirror in self._mirrors:
            mirror.end()

    def step(self, record: Mapping[str, Any]) -> None:
        """Passes on the record of a step; returns at once."""
        for mirror in self._mirrors:
            mirror.add(record)


class _Mirror:
    """One tracker, its thread and its queue."""

    def __init__(
        self, name: str, make: Callable[[], Tracker], folder: RunFolder, step: int, say: Callable[[str], None]
    ) -> None:
        self._name = name
        self._make = make
        self._folder = folder
        self._step = step
        self._say = say
        self._records: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_LONGEST_QUEUE)
        self._on = True
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)

    def add(self, record: Mapping[str, Any]) -> None:
        if self._on:
            try:
                self._records.put_nowait(dict(record))
            except queue.Full:
                self._switch_off(f"falls behind by {_LONGEST_QUEUE} steps")

    def end(self) -> None:
        if not self._on:
            return
        with suppress(queue.Full):
            self._records.put_nowait(None)
        self.thread.join(_LAST_WAIT_SECONDS)
        if self.thread.is_alive():
            self._switch_off(f"not done {_LAST_WAIT_SECONDS:g} seconds after the last step")

    def _work(self) -> None:
        try:
            tracker = self._make()
            for record in self._all_records():
                numbers = {
                    name: value
                    for name, value in record.items()
                    if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
                }
                tracker.log(record["step"], numbers)
            tracker.close()
        except ImportError as error:
            self._switch_off(f"{error}; pip install 'entasis[track]'")
        except Exception as error:  # whatever a tracker raises, training goes on
            self._switch_off(f"{type(error).__name__}: {error}")

    def _all_records(self) -> Iterator[Mapping[str, Any]]:
        """What stands in the folder up to the step that the run went on from, and then what comes."""
        yield from (record for record in self._folder.read_metrics() if record["step"] <= self._step)
        while (record := self._records.get()) is not None and self._on:
            yield record

    def _switch_off(self, why: str) -> None:
        if self._on:
            self._on = False
            line = f"{self._name}: {why}; switched off, and metrics.jsonl has every record"
            with suppress(OSError):
                self._say(" ".join(line.split()))


class _TensorBoard:
    """Event files in `tensorboard/` of the run folder, written anew at each start."""

    def __init__(self, folder: RunFolder) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = folder.path / "tensorboard"
        shutil.rmtree(place, ignore_errors=True)
        self._writer = SummaryWriter(str(place), flush_secs=_TENSORBOARD_FLUSH_SECONDS)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """A run at Weights & Biases for each start; those of one run folder are a group."""

    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        import wandb

        assert config.track.wandb is not None
        self._run = wandb.init(
            project=config.track.wandb.project,
            mode=config.track.wandb.mode,
            name=folder.path.name,
            group=str(folder.path),
            dir=str(folder.path),
            config=config.model_dump(mode="json"),
            settings={"silent": True, "console": "off", "init_timeout": _SERVICE_SECONDS},
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()
