"""Comparing shapes at one budget: check the match, tune each shape's rate, train every shape with every seed, report.

Seeds are paired: for one seed all shapes see the same batches. Everything is derived from the run folders, so that a
study that was stopped goes on where it was, and a finished run is never trained again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from entasis.errors import ConfigError, EntasisError
from entasis.report.comparison import write_report
from entasis.report.schema import Comparison, RatePoint
from entasis.run.config import RunConfig
from entasis.run.files import write_json
from entasis.run.folder import RunFolder
from entasis.run.open_data import open_data
from entasis.run.study_sections import CompareSection
from entasis.shape.budget import Budget, budget
from entasis.shape.match import MATCH_FIELDS
from entasis.shape.registry import Design
from entasis.study.results import ShapeRuns, comparison_results
from entasis.study.trials import final_losses
from entasis.study.workers import Job, share_cores, train_jobs


@dataclass(frozen=True, slots=True)
class Entry:
    """One shape of a comparison."""

    name: str
    config: RunConfig
    """The run's configuration, but for seed, rate and folder."""
    design: Design
    budget: Budget


def compare(
    config: RunConfig, console: Console, *, command: str, allow_unequal: bool = False, workers: int = 1
) -> Comparison:
    """Runs the comparison of `config` to its end and writes `results.json` and `report.html` into its folder.

    With several `workers` as many runs are trained at once, each in a process of its own; where the number of CPU
    threads is `auto` they share the cores.

    Raises:
        ConfigError: there is nothing to compare, or the budgets differ by more than the tolerance.
        EntasisError: a run failed; the line names it. What is finished is kept.
    """
    section = config.compare
    if section is None:
        raise ConfigError("compare: missing; list the shapes to compare under compare.shapes")
    folder = Path(config.out)
    data = open_data(config.data)
    entries = [_entry(name, config, data.vocab_size) for name in section.shapes]
    reference = _reference(entries)
    unequal = _unequal(entries, reference, section)
    if unequal and not allow_unequal:
        raise ConfigError(f"compare.match: {'; '.join(unequal.values())}; change the shapes, or use --allow-unequal")

    RunFolder(folder).require_study()
    with RunFolder(folder).locked():
        tuning = _tune(entries, section, folder, console, workers)
        rates = {
            entry.name: _best_rate(entry.name, tuning[entry.name]) or config.optimizer.learning_rate
            for entry in entries
        }
        runs: dict[str, list[Path]] = {entry.name: [] for entry in entries}
        jobs: list[Job] = []
        total = len(section.seeds) * len(entries)
        # Seeds outside, shapes inside: the shapes' rates are measured in turn, under the same conditions.
        for seed in section.seeds:
            for entry in entries:
                out = folder / "runs" / f"{entry.name}-seed{seed}"
                run = _run_config(entry, seed, rates[entry.name], out, workers)
                jobs.append(Job(run, f"{entry.name}, seed {seed} ({len(jobs) + 1}/{total})"))
                runs[entry.name].append(out)
        for _, divergence in train_jobs(jobs, console, workers=workers):
            if divergence:
                raise divergence

        console.print("writing the report", markup=False, highlight=False)
        results = comparison_results(
            config,
            data,
            command=command,
            reference=reference.name,
            unequal=list(unequal),
            workers=workers,
            shapes=[
                ShapeRuns(
                    entry.name, entry.design, entry.budget, rates[entry.name], tuning[entry.name], runs[entry.name]
                )
                for entry in entries
            ],
        )
        write_json(folder / "results.json", results)
        write_report(results, folder / "report.html")
    return results


def _entry(name: str, config: RunConfig, vocab_size: int) -> Entry:
    own = config.for_shape(name)
    design = own.design(vocab_size)
    return Entry(name, own, design, budget(design.shape, own.block(vocab_size)))


def _reference(entries: Sequence[Entry]) -> Entry:
    """The shape named uniform, else the first uniform one, else the first."""
    named = [entry for entry in entries if entry.name == "uniform"]
    straight = [entry for entry in entries if entry.design.family == "uniform"]
    return [*named, *straight, *entries][0]


def _unequal(entries: Sequence[Entry], reference: Entry, section: CompareSection) -> Mapping[str, str]:
    """Shapes whose budget differs from the reference's by more than the tolerance, and by how much."""
    field = MATCH_FIELDS[section.match.by]
    expected = getattr(reference.budget, field)
    found = {}
    for entry in entries:
        value = getattr(entry.budget, field)
        gap = abs(value - expected) / expected if expected else float(value != expected)
        if gap > section.match.tolerance:
            found[entry.name] = (
                f"{entry.name} has {value:,} {field} and {reference.name} {expected:,}, {gap:.2%} apart "
                f"(tolerance {section.match.tolerance:.2%})"
            )
    return found


def _tune(
    entries: Sequence[Entry], section: CompareSection, folder: Path, console: Console, workers: int
) -> dict[str, list[RatePoint]]:
    """Each shape's final held-out loss at each rate; empty lists without tuning."""
    rates = section.tune.learning_rate if section.tune else []
    seed = section.tune.seed if section.tune else 0
    jobs = [
        Job(
            _run_config(entry, seed, rate, folder / "tuning" / f"{entry.name}-rate{rate!r}", workers),
            f"{entry.name}, tuning at {rate:g} ({number}/{len(rates)})",
        )
        for entry in entries
        for number, rate in enumerate(rates, start=1)
    ]
    losses = iter(final_losses(jobs, console, workers=workers))
    return {
        entry.name: [RatePoint(learning_rate=rate, final_val_loss=next(losses)) for rate in rates] for entry in entries
    }


def _best_rate(name: str, tuning: Sequence[RatePoint]) -> float | None:
    """The rate with the lowest held-out loss; None without tuning."""
    finite = [
        (point["final_val_loss"], point["learning_rate"]) for point in tuning if point["final_val_loss"] is not None
    ]
    if tuning and not finite:
        raise EntasisError(f"compare.tune: {name} diverged at every rate; try lower ones")
    return min(finite)[1] if finite else None


def _run_config(entry: Entry, seed: int, rate: float, out: Path, workers: int) -> RunConfig:
    return share_cores(
        entry.config.model_copy(
            update={
                "train": entry.config.train.model_copy(update={"seed": seed}),
                "optimizer": entry.config.optimizer.model_copy(update={"learning_rate": rate}),
                "out": str(out),
            }
        ),
        workers,
    )
