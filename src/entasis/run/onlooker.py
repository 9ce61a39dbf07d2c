"""The run folder as all ranks but the first see it: they read what is there, and the first one writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from entasis.run.config import RunConfig
from entasis.run.folder import RunFolder
from entasis.shape.records import Shape


class OnlookerFolder(RunFolder):
    """A run folder in which nothing is written."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nothing: the first rank holds the folder."""
        yield

    def write(self, config: RunConfig, shape: Shape, environment: Mapping[str, Any]) -> None:
        """Nothing."""

    def mend_metrics(self) -> None:
        """Nothing."""

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Nothing."""

    def sync_metrics(self) -> None:
        """Nothing."""

    def log(self, line: str) -> None:
        """Nothing."""
