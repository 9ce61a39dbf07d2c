"""Comparisons as a study leaves them, made up but consistent: real shapes, real budgets, real statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

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
from entasis.shape.budget import budget
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape
from entasis.study.statistics import mean, mean_curve, paired_difference, reach, sample_sd

BuildComparison = Callable[..., Comparison]

_BYTES_PER_TOKEN = 3.9
_WIDTHS = {
    "uniform": [256] * 8,
    "prism": [256] * 8,
    "bowtie": [384, 320, 256, 224, 160, 128, 184, 312],
    "diamond": [160, 192, 256, 320, 344, 296, 256, 160],
    "growing": [144, 184, 224, 248, 272, 296, 312, 328],
    "narrowing": [336, 304, 280, 256, 248, 224, 200, 168],
    "openelm": [256, 256, 256, 256, 256, 256, 256, 256],
    "tapered": [288, 288, 272, 256, 256, 240, 240, 224],
}
_HEADS = {"prism": [1, 1, 2, 2, 8, 8, 8, 8], "openelm": [4, 4, 4, 8, 8, 8, 16, 16]}
_GAIN = {"prism": -0.004, "bowtie": -0.031, "diamond": 0.05, "growing": 0.02, "narrowing": -0.015, "tapered": -0.002}


def _shape(family: str) -> Shape:
    heads = _HEADS.get(family, [8] * 8)
    layers = [
        LayerShape(width=width, heads=count, kv_heads=count, head_dim=width // count, mlp_hidden=4 * width)
        for width, count in zip(_WIDTHS[family], heads, strict=True)
    ]
    return Shape(tuple(layers), embed_width=256)


def _curve(family: str, seed: int, steps: int, batch_tokens: int, random: np.random.Generator) -> list[CurvePoint]:
    marks = [*range(0, steps, max(1, steps // 24)), steps]
    offset, noise = float(random.normal(0, 0.004)), random.normal(0, 0.0025, len(marks))
    common = 0.02 * math.sin(seed)  # what a seed does to every shape alike
    losses = [
        2.95 + common + 5.35 * math.exp(-mark / (0.12 * steps)) + 0.55 * (1 - mark / steps) ** 2 + float(noise[index])
        for index, mark in enumerate(marks)
    ]
    gain = _GAIN.get(family, 0.0) + (offset if family in _GAIN else 0.0)
    return [
        CurvePoint(step=mark, tokens=mark * batch_tokens, val_loss=loss + gain * (1 - math.exp(-mark / (0.3 * steps))))
        for mark, loss in zip(marks, losses, strict=True)
    ]


def _load(random: np.random.Generator) -> list[ExpertLoad]:
    """Six experts in layers 3 and 6."""
    return [ExpertLoad(layer=layer, shares=random.dirichlet([8.0] * 6).round(4).tolist()) for layer in (3, 6)]


def _run(family: str, seed: int, steps: int, batch_tokens: int, experts: Sequence[str]) -> RunResult:
    random = np.random.default_rng([seed, *map(ord, family)])
    curve = _curve(family, seed, steps, batch_tokens, random)
    best = min(curve, key=lambda point: point["val_loss"])
    return RunResult(
        seed=seed,
        folder=f"runs/{family}-seed{seed}",
        curve=curve,
        train_curve=[TrainPoint(step=p["step"], train_loss=p["val_loss"] - 0.03) for p in curve],
        final_val_loss=curve[-1]["val_loss"],
        final_bits_per_byte=curve[-1]["val_loss"] / math.log(2) / _BYTES_PER_TOKEN,
        best_step=best["step"],
        best_val_loss=best["val_loss"],
        tokens_per_second=4000.0 + 150 * float(random.random()),
        expert_load=_load(random) if family in experts else [],
    )


def _tuning(family: str) -> list[RatePoint]:
    low, high = math.log(7.5e-4), math.log(2.4e-2)
    rates = [round(math.exp(low + (high - low) * part / 5), 6) for part in range(6)]
    centre = math.log({"bowtie": 2.4e-2, "prism": 3e-3}.get(family, 4.5e-3))
    return [
        RatePoint(
            learning_rate=value,
            final_val_loss=None
            if family == "prism" and value > 0.02
            else 2.95 + _GAIN.get(family, 0) + 0.03 * (math.log(value) - centre) ** 2,
        )
        for value in rates
    ]


def build_comparison(
    families: Sequence[str] = ("uniform", "prism", "bowtie"),
    *,
    names: dict[str, str] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    tuned: bool = False,
    exploratory: bool = True,
    match_tolerance: float = 0.01,
    style: str = "llama",
    mask_share: float | None = None,
    experts: Sequence[str] = (),
    sample: str = " of the house of Israel, and said to them,\n\n“Behold, I will make a covenant with you.”",
) -> Comparison:
    """A comparison of `families`; the first is the reference. `names` renames shapes, `experts` have some.

    With `mask_share`: encoders.
    """
    names = {family: (names or {}).get(family, family) for family in families}
    steps, batch_tokens = 300, 8192
    config = ModelConfig(vocab_size=4096, context=256, style=style)  # type: ignore[arg-type]
    budgets = {family: budget(_shape(family), config) for family in families}
    runs = {family: [_run(family, seed, steps, batch_tokens, experts) for seed in seeds] for family in families}
    bits = {family: mean([run["final_bits_per_byte"] or 0.0 for run in runs[family]]) for family in families}
    if mask_share is not None:
        for run in (run for family in families for run in runs[family]):
            run["final_bits_per_byte"] = None
    base = families[0]
    base_losses = [run["final_val_loss"] for run in runs[base]]
    base_flops = 3.0 * budgets[base].flops_per_token * batch_tokens * steps
    shapes: dict[str, ShapeResult] = {}
    for family in families:
        losses = [run["final_val_loss"] for run in runs[family]]
        tuning = _tuning(family) if tuned else []
        finished = [point for point in tuning if point["final_val_loss"] is not None]
        best = min(finished, key=lambda point: point["final_val_loss"] or 0.0)["learning_rate"] if finished else 3e-3
        counted = budgets[family]
        shapes[names[family]] = ShapeResult(
            family=family,
            settings={"family": family},
            model={"resize": "zero"} if family == "diamond" else {},
            shape=_shape(family).to_dict(),
            budget=counted.to_dict(),
            ratio=counted.ratio_to(budgets[base]),
            warnings=["layer 6: head dim 20 is no multiple of 8; attention kernels pad it"]
            if family == "bowtie"
            else [],
            learning_rate=best,
            tuning=tuning,
            tuned_at_edge=bool(tuning) and best in (tuning[0]["learning_rate"], tuning[-1]["learning_rate"]),
            runs=runs[family],
            mean_val_loss=mean(losses),
            sd_val_loss=sample_sd(losses),
            mean_bits_per_byte=bits[family] if mask_share is None else None,
            mean_best_step=mean([run["best_step"] for run in runs[family]]),
            tokens_per_parameter=(1 if exploratory else 80)
            * steps
            * batch_tokens
            / (counted.parameters - counted.embedding_parameters),
            tokens_per_second_ratio=1.0 if family == base else 1.023,
            reach=reach(
                mean_curve([run["curve"] for run in runs[family]]),
                mean(base_losses),
                total_steps=steps,
                flops_per_step=3.0 * counted.flops_per_token * batch_tokens,
                reference_flops=base_flops,
            ),
            difference=None
            if family == base
            else paired_difference(
                losses, base_losses, name=names[family], reference_name=names[base], unit=loss_unit(mask_share)
            ),
            sample=sample if mask_share is None else None,
        )
    return Comparison(
        format=COMPARISON_FORMAT,
        title="Uniform against prism against bowtie on the World English Bible",
        created="2026-11-29T12:00:00Z",
        command="entasis compare configs/demo.yaml",
        config=_config(families, names, seeds),
        environment={
            "python": "3.11.7",
            "torch": "2.13.0",
            "device": {"kind": "cpu", "name": "AMD EPYC", "threads": 2},
            "packages": ["numpy 2.4.6", "scipy 1.17.1"],
        },
        data=DataSummary(
            name="web-bible",
            request='{"sources": ["web-bible"]}',
            fingerprint="sha256:5f1f4a0f4d1a0e0c9b6f0f4b1d2c3e4f5a6b7c8d9e0f1a2b3c4d5e6f7a8b9c0d",
            tokenizer="bpe:4096",
            vocab_size=4096,
            train_tokens=1_012_345,
            held_out_tokens=10_345,
            held_out_bytes_per_token=_BYTES_PER_TOKEN,
            unigram_bits_per_byte=2.31,
        ),
        reference=names[base],
        match_by="effective",
        match_tolerance=match_tolerance,
        unequal=[
            name
            for name, shape in shapes.items()
            if abs((shape["ratio"]["effective_parameters"] or 0.0) - 1) > match_tolerance
        ],
        seeds=list(seeds),
        tune_seed=100 if tuned else None,
        mask_share=mask_share,
        steps=steps,
        batch_tokens=batch_tokens,
        train_tokens_per_run=steps * batch_tokens,
        epochs=steps * batch_tokens / 1_012_345,
        exploratory=exploratory,
        sample_prompt="In the beginning",
        workers=1,
        contrasts=[
            Contrast(
                name="bowtie against prism",
                of=[names["bowtie"]],
                against=[names["prism"]],
                difference=paired_difference(
                    [run["final_val_loss"] for run in runs["bowtie"]],
                    [run["final_val_loss"] for run in runs["prism"]],
                    name=names["bowtie"],
                    reference_name=names["prism"],
                    unit=loss_unit(mask_share),
                ),
            )
        ]
        if {"bowtie", "prism"} <= set(families)
        else [],
        shapes=shapes,
    )


def _config(families: Sequence[str], names: dict[str, str], seeds: Sequence[int]) -> dict[str, Any]:
    return {
        "data": {"path": "data/web-bible"},
        "model": {"style": "llama", "context": 256},
        "shape": {"family": "uniform", "layers": 8, "width": 256, "heads": 8},
        "train": {"steps": 300, "batch_tokens": 8192, "seed": 0},
        "compare": {"shapes": {names[family]: {"family": family} for family in families}, "seeds": list(seeds)},
    }


@pytest.fixture(name="build")
def build_fixture() -> BuildComparison:
    """`build_comparison`, for tests."""
    return build_comparison
