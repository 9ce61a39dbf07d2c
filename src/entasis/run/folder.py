"""The run folder: who may write in it, what the run is, and its metrics.

config.yaml  shape.json  environment.json  data.json  metrics.jsonl  log.txt  tokenizer/  checkpoints/step-NNNNNNNN/
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from entasis.errors import ConfigError, EntasisError, ShapeError
from entasis.run.config import RunConfig, parse_config
from entasis.run.files import naming, read_object, write_json, write_text
from entasis.run.lock import locked_folder
from entasis.settings import read_yaml
from entasis.shape.records import Shape

# Settings that may change when a run goes on; it says which did. Most leave the weights alone, but `steps` moves the
# learning rate's schedule, and devices, threads and compilation may change the last bits.
_MAY_CHANGE = {
    ("out",),
    ("compare",),
    ("transfer",),
    # The data's fingerprint decides, not where it lies and how it is said.
    ("data", "path"),
    ("data", "format"),
    ("data", "vocab_size"),  # prepared data says it itself; where the model's tables would change, no checkpoint fits
    ("data", "held_out"),
    ("data", "eos_id"),
    ("data", "mixture"),
    ("data", "cache"),
    ("train", "steps"),
    ("train", "evaluate_every"),
    ("train", "evaluate_tokens"),
    ("train", "checkpoint_every"),
    ("train", "keep_checkpoints"),
    ("train", "skip_bad_steps"),
    ("train", "device"),
    ("train", "threads"),
    ("train", "compile"),
    ("train", "activation_checkpointing"),
}


_OF_A_STUDY = ("results.json", "report.html", "runs", "tuning", "trials")


class RunFolder:
    """Paths and files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.shape_file = path / "shape.json"
        self.environment_file = path / "environment.json"
        self.data_file = path / "data.json"
        self.metrics_file = path / "metrics.jsonl"
        self.log_file = path / "log.txt"
        self.tokenizer = path / "tokenizer"
        self.checkpoints = path / "checkpoints"
        self.files = (
            "config.yaml", "shape.json", "environment.json", "data.json", "metrics.jsonl", "log.txt", "tokenizer",
            "checkpoints", "diverged.json", "tensorboard", "wandb",
        )  # fmt: skip
        """Names of everything that a run writes."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder, as `locked_folder` does."""
        with locked_folder(self.path):
            yield

    def require_study(self, setting: str = "out") -> None:
        """Refuses a folder that is not a study's: one that holds a run, or files of somebody else.

        Raises:
            ConfigError: names the setting, the folder and what it holds.
        """
        if self.holds_a_run:
            raise ConfigError(f"{setting}: {self.path} holds a run of `entasis train`; choose another folder")
        if not any((self.path / name).exists() for name in _OF_A_STUDY):
            self._require_no_strangers(setting, ())

    def _require_no_strangers(self, setting: str, own: Collection[str]) -> None:
        """Refuses a folder with other than its own files, so that nothing mixes with a text, data or a study."""
        if not self.path.is_dir():
            return
        names = sorted(path.name for path in self.path.iterdir() if not path.name.startswith("."))
        strangers = [name for name in names if name not in own]
        if strangers:
            shown = ", ".join(strangers[:3]) + (", …" if len(strangers) > 3 else "")
            raise ConfigError(f"{setting}: {self.path} holds other files ({shown}); choose an empty or new folder")

    @property
    def holds_a_run(self) -> bool:
        """Whether a run was begun here."""
        return self.shape_file.exists() or self.checkpoints.exists()

    def check(self, config: RunConfig, shape: Shape, environment: Mapping[str, Any]) -> list[str]:
        """Checks that the run that was begun here, if there is one, is the run of `config`; changes nothing.

        Returns:
            One line for each setting that changed and may.

        Raises:
            ConfigError: the folder holds a run with another setting; names the field and both values.
        """
        if not self.config_file.exists():
            # A run that was killed before its configuration was written, the last of its files, begins anew.
            if self.checkpoints.exists():
                raise ConfigError(
                    f"out: {self.path} holds checkpoints, but the config.yaml that they were made with is gone; put it "
                    "back, or choose another folder"
                )
            self._require_no_strangers("out", self.files)
            return []
        if not self.holds_a_run:
            raise ConfigError(
                f"out: {self.config_file} stands there without {self.shape_file}, so no run wrote it; "
                "choose another folder"
            )
        changes = _compare(self.read_config().model_dump(mode="json"), config.model_dump(mode="json"), self.path)
        if self.read_shape() != shape:
            raise ConfigError(
                f"shape: {self.shape_file} is not the shape of {self.config_file}; it was edited or belongs to "
                "another run"
            )
        before = self.read_environment() if self.environment_file.exists() else {}
        return changes + [
            f"{name}: {before.get(name)!r} -> {value!r}"
            for name, value in environment.items()
            if before.get(name) != value
        ]

    def write(self, config: RunConfig, shape: Shape, environment: Mapping[str, Any]) -> None:
        """Writes what the run is."""
        # The configuration last: a folder with one then has the rest too.
        write_text(self.shape_file, shape.to_json() + "\n")
        write_json(self.environment_file, environment)
        write_text(self.config_file, config.to_yaml())

    def read_config(self) -> RunConfig:
        """The configuration that was saved at the run's start."""
        return parse_config(read_yaml(self.config_file))

    def read_shape(self) -> Shape:
        """The shape that was saved at the run's start."""
        try:
            return Shape.from_dict(read_object(self.shape_file))
        except ShapeError as error:
            raise EntasisError(f"{self.shape_file}: {error}") from None

    def read_environment(self) -> dict[str, Any]:
        """What the run ran on when it last took a step."""
        return read_object(self.environment_file)

    def mend_metrics(self) -> None:
        """Cuts off a last line that a kill left torn."""
        if not self.metrics_file.exists():
            return
        with self.metrics_file.open("r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Adds one record; `sync_metrics` makes it last."""
        _append(self.metrics_file, json.dumps(record) + "\n")

    def sync_metrics(self) -> None:
        """Forces the records to the disk, before a checkpoint that includes their steps is announced."""
        if self.metrics_file.exists():
            with naming(self.metrics_file), self.metrics_file.open("ab") as file:
                os.fsync(file.fileno())

    def read_metrics(self) -> list[dict[str, Any]]:
        """One record a step, in order; where the run went back to a checkpoint, what it did after that counts."""
        if not self.metrics_file.exists():
            return []
        records: list[dict[str, Any]] = []
        with self.metrics_file.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):  # torn by a kill; `mend_metrics` cuts it off
                    break
                try:
                    record = json.loads(line)
                    step = int(record["step"])
                    numbers = [record.get("train_loss", 0.0), record.get("val_loss", 0.0)]
                    if not all(isinstance(number, int | float) for number in numbers):
                        raise TypeError
                except (ValueError, KeyError, TypeError, RecursionError):
                    raise EntasisError(f"{self.metrics_file}: line {number} is not a record") from None
                # A run that goes back to a checkpoint goes on from there: what it had done beyond is not part of it.
                while records and records[-1]["step"] >= step:
                    records.pop()
                records.append(record)
        return records

    def log(self, line: str) -> None:
        """Adds a line with the time to `log.txt`."""
        _append(self.log_file, f"{datetime.now(UTC).isoformat(timespec='seconds')} {line}\n")


def _append(path: Path, text: str) -> None:
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(text)


def _compare(saved: dict[str, Any], given: dict[str, Any], folder: Path) -> list[str]:
    changes = []
    for where in _leaves(saved) | _leaves(given):
        before, now = _get(saved, where), _get(given, where)
        if before == now:
            continue
        line = f"{'.'.join(where)}: {before!r} -> {now!r}"
        if where in _MAY_CHANGE or where[0] in {"compare", "parallel", "track"}:
            changes.append(line)
        else:
            raise ConfigError(
                f"{'.'.join(where)}: the run in {folder} was begun with {before!r}, and now it is {now!r}; "
                "set it back, or choose another `out`"
            )
    return sorted(changes)


def _leaves(data: dict[str, Any], prefix: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    found: set[tuple[str, ...]] = set()
    for key, value in data.items():
        found |= _leaves(value, (*prefix, key)) if isinstance(value, dict) and value else {(*prefix, key)}
    return found


def _get(data: Any, where: tuple[str, ...]) -> Any:  # noqa: ANN401 - plain data
    for key in where:
        data = data.get(key) if isinstance(data, dict) else None
    return data
