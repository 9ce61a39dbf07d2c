"""Does the learning rate transfer? Each family at several widths, each width tuned over one grid with every seed.

The question goes beyond a coordinate check: is the best rate of a rung the best of the next? Everything is read from
the run folders, so that a study that was stopped goes on where it was, and a finished run is never trained again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from entasis.data.dataset import TokenSource
from entasis.errors import ConfigError
from entasis.report.scaling_schema import TRANSFER_FORMAT, Transfer, TransferFamily
from entasis.report.transfer import write_transfer
from entasis.run.config import RunConfig
from entasis.run.files import write_json
from entasis.run.folder import RunFolder
from entasis.run.open_data import open_data
from entasis.run.study_sections import TransferSection
from entasis.shape.budget import budget
from entasis.study.coordinates import rung_record
from entasis.study.grids import move, tuned_rung
from entasis.study.rungs import rung
from entasis.study.trials import final_losses
from entasis.study.workers import Job, share_cores


def transfer(config: RunConfig, console: Console, *, command: str, workers: int = 1) -> Transfer:
    """Runs the study of `config.transfer` to its end and writes `results.json` and `report.html` into its folder.

    With several `workers` as many runs are trained at once, each in a process of its own.

    Raises:
        ConfigError: there is no section `transfer`, a width has no shape, or the folder holds a run.
        EntasisError: a rung diverged at every rate. What is finished is kept.
    """
    section = config.transfer
    if section is None:
        raise ConfigError("transfer: missing; list widths and rates under transfer.widths and transfer.learning_rate")
    ladders = {name: _ladder(name, each, section) for name, each in _families(config).items()}
    folder = Path(config.out)
    data = open_data(config.data)
    RunFolder(folder).require_study()
    with RunFolder(folder).locked():
        trials = {
            (name, width, value, seed): share_cores(_trial(each, folder, name, width, value, seed), workers)
            for seed in section.seeds
            for name, ladder in ladders.items()
            for width, each in zip(section.widths, ladder, strict=True)
            for value in section.learning_rate
        }
        jobs = [
            Job(trial, f"{name} {width} at {value:g}, seed {seed} ({number}/{len(trials)})")
            for number, ((name, width, value, seed), trial) in enumerate(trials.items(), start=1)
        ]
        losses = dict(zip(trials, final_losses(jobs, console, workers=workers), strict=True))

        def grid(name: str, width: int) -> dict[float, list[float | None]]:
            return {
                value: [losses[name, width, value, seed] for seed in section.seeds] for value in section.learning_rate
            }

        families = {}
        for name, ladder in ladders.items():
            rungs = [
                tuned_rung(
                    name, rung_record(each, data.vocab_size), grid(name, width), _tokens_per_parameter(each, data)
                )
                for width, each in zip(section.widths, ladder, strict=True)
            ]
            moves = [move(name, smaller, larger) for smaller, larger in pairwise(rungs)]
            families[name] = TransferFamily(settings=ladder[0].shape, rungs=rungs, moves=moves)
        some = RunFolder(Path(next(iter(trials.values())).out))
        results = Transfer(
            format=TRANSFER_FORMAT,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=command,
            config=config.model_dump(mode="json"),
            environment=json.loads(some.environment_file.read_text(encoding="utf-8")),
            data=data.name,
            data_fingerprint=data.fingerprint,
            widths=list(section.widths),
            base_width=section.base_width,
            learning_rates=list(section.learning_rate),
            seeds=list(section.seeds),
            steps=config.train.steps,
            batch_tokens=config.train.batch_tokens,
            families=families,
        )
        write_json(folder / "results.json", results)
        write_transfer(results, folder / "report.html")
    return results


def _families(config: RunConfig) -> dict[str, RunConfig]:
    """The compared shapes by name; without a comparison the one shape, by its family's."""
    if config.compare is None:
        return {str(config.shape["family"]): config}
    return {name: config.for_shape(name) for name in config.compare.shapes}


def _ladder(name: str, config: RunConfig, section: TransferSection) -> Sequence[RunConfig]:
    try:
        return [rung(config, width, section.base_width) for width in section.widths]
    except ConfigError as error:
        raise ConfigError(f"transfer.widths, {name}: {error}") from None


def _trial(config: RunConfig, folder: Path, name: str, width: int, value: float, seed: int) -> RunConfig:
    return config.model_copy(
        update={
            "train": config.train.model_copy(update={"seed": seed}),
            "optimizer": config.optimizer.model_copy(update={"learning_rate": value}),
            "out": str(folder / "trials" / f"{name}-width{width}-rate{value!r}-seed{seed}"),
        }
    )


def _tokens_per_parameter(config: RunConfig, data: TokenSource) -> float:
    counted = budget(config.design(data.vocab_size).shape, config.block(data.vocab_size))
    return config.train.steps * config.train.batch_tokens / (counted.parameters - counted.embedding_parameters)
