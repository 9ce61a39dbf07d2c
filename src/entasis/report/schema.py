"""The files that studies write and reports draw. Plain data on the ground floor, so that both sides can know it.

All losses are nats per token that is predicted (each next one, or those hidden from an encoder), all bits per byte use
the held-out text's bytes, rates are tokens per second.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

COMPARISON_FORMAT = "entasis-comparison-2"


class CurvePoint(TypedDict):
    """One point of a run's curve of held-out loss."""

    step: int
    tokens: int
    val_loss: float


class TrainPoint(TypedDict):
    """One point of a run's curve of training loss (thinned to at most some hundred points)."""

    step: int
    train_loss: float


class ExpertLoad(TypedDict):
    """How the experts of one layer were used in the run's last step."""

    layer: int
    """From 1."""
    shares: list[float]
    """Of the layer's assignments, by expert; an even load is 1 / experts for each."""


class RunResult(TypedDict):
    """One finished run of one shape with one seed."""

    seed: int
    folder: str
    """Relative to the comparison folder."""
    curve: list[CurvePoint]
    train_curve: list[TrainPoint]
    final_val_loss: float
    final_bits_per_byte: float | None
    """None under a masked-token objective, which gives no probability of the text."""
    best_step: int
    """Step of the lowest held-out loss."""
    best_val_loss: float
    tokens_per_second: float
    """Median over the steps, evaluation and saving excluded."""
    expert_load: list[ExpertLoad]
    """Of the layers with experts."""


class RatePoint(TypedDict):
    """One trial of a learning-rate search."""

    learning_rate: float
    final_val_loss: float | None
    """None: the trial's loss became non-finite."""


class Reach(TypedDict):
    """When a shape's mean curve first reaches the reference's mean final loss (interpolated between evaluations)."""

    steps: float | None
    """None: it does not reach it."""
    flops: float | None
    """Forward and backward, counted as three forward passes."""
    steps_ratio: float | None
    """To the steps of the whole run."""
    flops_ratio: float | None
    """To the FLOPs of the reference's whole run."""


class Difference(TypedDict):
    """Paired differences of final held-out loss, seed by seed: this shape minus the reference."""

    pairs: list[float]
    mean: float
    low: float | None
    """95 % interval (paired t); None with fewer than two seeds, or where all pairs are the same non-zero number."""
    high: float | None
    p_value: float | None
    smallest_detectable: float | None
    """The smallest true difference that this design shows with 80 % power at the 5 % level (paired t, sd of these
    pairs); None with fewer than two seeds or without any spread."""
    verdict: Literal["lower", "higher", "no difference shown", "identical", "one seed"]
    sentence: str
    """The verdict in plain words, with the numbers."""


class Contrast(TypedDict):
    """Two groups of shapes against each other: per seed, the mean final loss of one minus that of the other."""

    name: str
    of: list[str]
    against: list[str]
    difference: Difference


class ShapeResult(TypedDict):
    """Everything about one shape of a comparison."""

    family: str
    settings: dict[str, Any]
    model: dict[str, Any]
    """Settings of the model that this shape alone has."""
    shape: dict[str, Any]
    """`Shape.to_dict()`."""
    budget: dict[str, int]
    ratio: dict[str, float | None]
    """Budget divided by the reference's, per field."""
    warnings: list[str]
    learning_rate: float
    tuning: list[RatePoint]
    """Empty where the rate was not tuned."""
    tuned_at_edge: bool
    """The best rate is the lowest or highest that was tried: the optimum may lie outside."""
    runs: list[RunResult]
    mean_val_loss: float
    sd_val_loss: float | None
    mean_bits_per_byte: float | None
    """None as for each run."""
    mean_best_step: float
    tokens_per_parameter: float
    """Training tokens per non-embedding parameter (stored)."""
    tokens_per_second_ratio: float
    """Median rate divided by the reference's."""
    reach: Reach
    difference: Difference | None
    """None for the reference itself."""
    sample: str | None
    """How the first seed's model continues `sample_prompt`, which is not in it. None: an encoder, or no tokenizer."""


class DataSummary(TypedDict):
    """What the runs read."""

    name: str
    request: str
    """What it was prepared from, and how, in a line."""
    fingerprint: str
    tokenizer: str | None
    """None: other programs' files come without; there is then nothing per byte and no sample."""
    vocab_size: int
    train_tokens: int
    held_out_tokens: int
    held_out_bytes_per_token: float | None
    unigram_bits_per_byte: float | None
    """Bits per byte on the held-out text of the best model that ignores context (training unigram frequencies). None:
    not known."""


class Comparison(TypedDict):
    """`results.json` of a comparison folder."""

    format: str
    title: str
    created: str
    """ISO 8601, UTC."""
    command: str
    """The command that reproduces the study."""
    config: dict[str, Any]
    environment: dict[str, Any]
    data: DataSummary
    reference: str
    """The shape that the others are compared with."""
    match_by: str
    match_tolerance: float
    unequal: list[str]
    """Shapes outside the tolerance (only with --allow-unequal)."""
    seeds: list[int]
    tune_seed: int | None
    mask_share: float | None
    """Share of the tokens that is hidden from encoders and predicted; None: each next token is predicted."""
    steps: int
    batch_tokens: int
    train_tokens_per_run: int
    epochs: float
    """Times that a run sees each training window; of a mixture, those of the source that is seen most often."""
    exploratory: bool
    """Fewer than 20 tokens per non-embedding parameter: the study speaks of early learning speed, not of quality."""
    sample_prompt: str
    workers: int
    """Runs that were trained at once, so that each had a part of the machine."""
    shapes: dict[str, ShapeResult]
    contrasts: list[Contrast]
