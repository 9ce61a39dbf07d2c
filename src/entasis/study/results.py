"""From finished run folders to the numbers of a comparison (`report/schema.py`)."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from entasis.data.dataset import TokenSource
from entasis.errors import EntasisError
from entasis.evaluate.held_out import bits_per_byte
from entasis.generate.sample import generate_text
from entasis.report.numbers import loss_unit
from entasis.report.schema import (
    COMPARISON_FORMAT,
    Comparison,
    Contrast,
    CurvePoint,
    DataSummary,
    ExpertLoad,
    RatePoint,
    RunResult,
    ShapeResult,
    TrainPoint,
)
from entasis.run.config import RunConfig
from entasis.run.folder import RunFolder
from entasis.run.load import load_run
from entasis.run.study_sections import ContrastSection
from entasis.shape.budget import Budget
from entasis.shape.draw import findings_text
from entasis.shape.registry import Design
from entasis.study.statistics import mean, mean_curve, paired_difference, reach, sample_sd

QUALITY_TOKENS_PER_PARAMETER = 20
"""Below this, a comparison speaks of early learning speed, not of quality."""
_TRAIN_POINTS = 200
_SAMPLE_TOKENS = 120
_WARM_STEPS = 3
"""First steps of a process, slower than the rest, that the median rate leaves out."""


@dataclass(frozen=True, slots=True)
class ShapeRuns:
    """One shape's finished runs."""

    name: str
    design: Design
    budget: Budget
    learning_rate: float
    tuning: list[RatePoint]
    folders: list[Path]
    """One per seed, in the order of the seeds."""


def comparison_results(
    config: RunConfig,
    data: TokenSource,
    *,
    command: str,
    reference: str,
    unequal: list[str],
    workers: int,
    shapes: Sequence[ShapeRuns],
) -> Comparison:
    """Everything that a report says, from finished runs."""
    assert config.compare is not None
    section = config.compare
    bytes_per_token = data.bytes_per_token
    tokens = config.train.steps * config.train.batch_tokens
    by_name = {shape.name: shape for shape in shapes}
    runs = {
        shape.name: [
            _run_result(folder, seed, config, bytes_per_token)
            for seed, folder in zip(section.seeds, shape.folders, strict=True)
        ]
        for shape in shapes
    }
    results = {shape.name: _shape_result(shape, by_name[reference], runs, config, tokens) for shape in shapes}
    return Comparison(
        format=COMPARISON_FORMAT,
        title=_title([shape.name for shape in shapes]),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        config=config.model_dump(mode="json"),
        environment=json.loads(RunFolder(shapes[0].folders[0]).environment_file.read_text(encoding="utf-8")),
        data=DataSummary(
            name=data.name,
            request=json.dumps(data.request),
            fingerprint=data.fingerprint,
            tokenizer=data.tokenizer_name,
            vocab_size=data.vocab_size,
            train_tokens=data.train.tokens,
            held_out_tokens=data.held_out.tokens,
            held_out_bytes_per_token=bytes_per_token,
            unigram_bits_per_byte=data.unigram_bits_per_byte,
        ),
        reference=reference,
        match_by=section.match.by,
        match_tolerance=section.match.tolerance,
        unequal=unequal,
        seeds=list(section.seeds),
        tune_seed=section.tune.seed if section.tune else None,
        mask_share=config.mask_share,
        steps=config.train.steps,
        batch_tokens=config.train.batch_tokens,
        train_tokens_per_run=tokens,
        epochs=_epochs(config, data),
        exploratory=any(result["tokens_per_parameter"] < QUALITY_TOKENS_PER_PARAMETER for result in results.values()),
        sample_prompt=section.prompt,
        workers=workers,
        shapes=results,
        contrasts=[
            _contrast(name, contrast, runs, loss_unit(config.mask_share))
            for name, contrast in section.contrasts.items()
        ],
    )


def _contrast(name: str, section: ContrastSection, runs: dict[str, list[RunResult]], unit: str) -> Contrast:
    of, against = (_mean_finals([runs[shape] for shape in group]) for group in (section.of, section.against))
    return Contrast(
        name=name,
        of=list(section.of),
        against=list(section.against),
        difference=paired_difference(
            of, against, name=_group(section.of), reference_name=_group(section.against), unit=unit
        ),
    )


def _mean_finals(shapes: Sequence[Sequence[RunResult]]) -> list[float]:
    """Per seed, the mean of the shapes' final losses."""
    return [mean(losses) for losses in zip(*(_finals(runs) for runs in shapes), strict=True)]


def _group(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"the mean of {_title(names)}"


def _run_result(folder: Path, seed: int, config: RunConfig, bytes_per_token: float | None) -> RunResult:
    records = RunFolder(folder).read_metrics()
    curve = [
        CurvePoint(step=record["step"], tokens=record["tokens"], val_loss=record["val_loss"])
        for record in records
        if "val_loss" in record
        and (record["step"] % config.train.evaluate_every == 0 or record["step"] == config.train.steps)
    ]
    if not curve or records[-1]["step"] != config.train.steps or not math.isfinite(curve[-1]["val_loss"]):
        raise EntasisError(
            f"{folder}: its metrics.jsonl does not reach step {config.train.steps} with a held-out loss; it was "
            "altered: remove the folder, and the same command trains the run again"
        )
    stride = -(-len(records) // _TRAIN_POINTS)
    best = min(curve, key=lambda point: point["val_loss"])
    final = curve[-1]["val_loss"]
    rates = [record["tokens_per_second"] for record in records]
    return RunResult(
        seed=seed,
        folder=folder.relative_to(config.out).as_posix(),
        curve=curve,
        train_curve=[
            TrainPoint(step=r["step"], train_loss=r["train_loss"])
            for r in records[stride - 1 :: stride]
            if "train_loss" in r
        ],
        final_val_loss=final,
        final_bits_per_byte=None
        if bytes_per_token is None or config.mask_share is not None
        else bits_per_byte(final, bytes_per_token),
        best_step=best["step"],
        best_val_loss=best["val_loss"],
        tokens_per_second=median(rates[_WARM_STEPS:] or rates),
        expert_load=[
            ExpertLoad(layer=int(layer), shares=shares) for layer, shares in records[-1].get("expert_load", {}).items()
        ],
    )


def _shape_result(
    shape: ShapeRuns, reference: ShapeRuns, runs: dict[str, list[RunResult]], config: RunConfig, tokens: int
) -> ShapeResult:
    assert config.compare is not None
    own, other = runs[shape.name], runs[reference.name]
    losses, reference_losses = _finals(own), _finals(other)
    step_flops = [3 * entry.budget.flops_per_token * config.train.batch_tokens for entry in (shape, reference)]
    rates = [point["learning_rate"] for point in shape.tuning]
    bits = [run["final_bits_per_byte"] for run in own if run["final_bits_per_byte"] is not None]
    return ShapeResult(
        family=shape.design.family,
        settings=config.for_shape(shape.name).shape,
        model=config.compare.shapes[shape.name].get("model", {}),
        shape=shape.design.shape.to_dict(),
        budget=shape.budget.to_dict(),
        ratio=shape.budget.ratio_to(reference.budget),
        warnings=findings_text(shape.design.findings).splitlines(),
        learning_rate=shape.learning_rate,
        tuning=shape.tuning,
        tuned_at_edge=bool(rates) and shape.learning_rate in (min(rates), max(rates)),
        runs=own,
        mean_val_loss=mean(losses),
        sd_val_loss=sample_sd(losses),
        mean_bits_per_byte=mean(bits) if bits else None,
        mean_best_step=mean([run["best_step"] for run in own]),
        tokens_per_parameter=tokens / (shape.budget.parameters - shape.budget.embedding_parameters),
        tokens_per_second_ratio=_rate(own) / _rate(other),
        reach=reach(
            mean_curve([run["curve"] for run in own]),
            mean(reference_losses),
            total_steps=config.train.steps,
            flops_per_step=step_flops[0],
            reference_flops=step_flops[1] * config.train.steps,
        ),
        difference=None
        if shape is reference
        else paired_difference(
            losses,
            reference_losses,
            name=shape.name,
            reference_name=reference.name,
            unit=loss_unit(config.mask_share),
        ),
        sample=_continuation(shape.folders[0], config.compare.prompt) if config.mask_share is None else None,
    )


def _epochs(config: RunConfig, data: TokenSource) -> float:
    """How often the training text is read; of a mixture, the text that is read most often."""
    sequences = config.train.steps * config.batch_sequences
    return max(sequences * part.weight / part.source.train.windows(config.model.context) for part in data.parts)


def _continuation(run: Path, prompt: str) -> str | None:
    loaded = load_run(run, report=lambda line: print(line, file=sys.stderr))
    if loaded.own_tokenizer is None:
        return None
    return generate_text(loaded.model, loaded.tokenizer, prompt, tokens=_SAMPLE_TOKENS).removeprefix(prompt)


def _finals(runs: Sequence[RunResult]) -> list[float]:
    return [run["final_val_loss"] for run in runs]


def _rate(runs: Sequence[RunResult]) -> float:
    return median(run["tokens_per_second"] for run in runs)


def _title(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
