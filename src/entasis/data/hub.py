"""Hugging Face datasets as sources: named ones and `hf:OWNER/NAME`, streamed in their own order through `datasets`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from entasis.errors import ConfigError, EntasisError

_PREFIX = "hf:"
_FORM = "hf:OWNER/NAME[:CONFIG[:SPLIT]][@REVISION]"
_SPEC = re.compile(
    r"hf:(?P<path>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]*)(?::(?P<split>[\w.-]+))?)?(?:@(?P<revision>[\w./-]+))?"
)


@dataclass(frozen=True, slots=True)
class HubDataset:
    """One split of one configuration of a dataset."""

    name: str = field(compare=False)
    """As it is shown and reported."""
    path: str
    """OWNER/NAME."""
    config: str | None = None
    """None: the dataset's default."""
    split: str = "train"
    revision: str | None = None
    """Branch, tag or commit; None: the newest state."""

    def __str__(self) -> str:
        return self.name

    def identity(self) -> dict[str, str | int]:
        """What tells this dataset from others. The content of a revision that moves is not compared."""
        parts = {"dataset": self.path, "config": self.config, "split": self.split, "revision": self.revision}
        return {key: value for key, value in parts.items() if value is not None}

    def documents(self, text_field: str) -> Iterator[str]:
        """The text of each row in the dataset's order. The library repeats requests that fail for a while.

        Raises:
            EntasisError: the library is missing, the network or the dataset cannot be reached, or a row holds no text.
        """
        try:
            import datasets
        except ImportError as error:
            raise EntasisError(f"{self.name}: needs the package datasets; run: pip install 'entasis[hub]'") from error
        number = 0
        try:
            for row in datasets.load_dataset(
                self.path, self.config, split=self.split, revision=self.revision, streaming=True
            ):
                number += 1
                yield self._text(row, number, text_field)
        except (datasets.exceptions.DatasetsError, ValueError) as error:
            raise EntasisError(f"{self.name}: {self.path} cannot be used ({_line(error)})") from error
        except _network_errors() as error:
            when = f"; it failed after {number:,} documents" if number else ""
            raise EntasisError(
                f"{self.name}: this source needs the network to stream {self.path}{when} ({_line(error)})"
            ) from error

    def _text(self, row: dict[str, Any], number: int, text_field: str) -> str:
        where = f"{self.name}, document {number:,}"
        if text_field not in row:
            known = ", ".join(list(row)[:10]) or "none"
            raise EntasisError(f"{where}: no field {text_field!r} (it has: {known}); choose one with --text-field")
        text = row[text_field]
        if not isinstance(text, str):
            raise EntasisError(f"{where}: field {text_field!r} holds {type(text).__name__}, not text")
        return text


DATASETS = {
    dataset.name: dataset
    for dataset in (
        HubDataset("fineweb", "HuggingFaceFW/fineweb", "sample-10BT"),
        HubDataset("dclm", "Zyphra/dclm-dedup"),
    )
}
"""What the papers train on: of FineWeb the sample of ten billion tokens, of DCLM the deduplicated set."""


def find_dataset(source: str) -> HubDataset | None:
    """The dataset that a source names; None if it names none.

    Raises:
        ConfigError: it begins like one and is not of the form.
    """
    if source in DATASETS:
        return DATASETS[source]
    if not source.startswith(_PREFIX):
        return None
    match = _SPEC.fullmatch(source)
    if match is None:
        raise ConfigError(f"SOURCE: {source}: expected {_FORM}")
    parts = match.groupdict()
    name = source.removeprefix(_PREFIX)
    return HubDataset(name, parts["path"], parts["config"] or None, parts["split"] or "train", parts["revision"])


def _network_errors() -> tuple[type[Exception], ...]:
    """What a failed connection raises: the system's errors, and those of the HTTP client that the library uses."""
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
