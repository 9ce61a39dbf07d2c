"""The files that studies over widths write and reports draw: a coordinate check, and the transfer of learning rates."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

COORDINATES_FORMAT = "entasis-coordinates-1"
TRANSFER_FORMAT = "entasis-transfer-1"


class Rung(TypedDict):
    """One width of a ladder."""

    width: int
    """`shape.width`."""
    shape: dict[str, Any]
    """`Shape.to_dict()`."""
    parameters: int
    logit_divisor: float
    block_rate: float


class Slope(TypedDict):
    """How a size goes with width: the exponent p of size ~ width^p, fitted for each seed by least squares in logs."""

    by_seed: list[float]
    """Empty where a size is zero or the widths are all one."""
    mean: float | None
    low: float | None
    """95 % interval of the mean over seeds (t); None with fewer than two."""
    high: float | None
    verdict: Literal["flat", "grows", "shrinks", "undecided", "one seed", "no slope"]
    """Flat, grows, shrinks: the whole interval is within the tolerance, above it, below it. Undecided: none of them."""


class Quantity(TypedDict):
    """One kind of activation at one place of the network."""

    name: str
    kind: Literal["embedding", "attention", "mlp", "stream", "logits"]
    layer: int | None
    """From 1; None: of no layer."""
    shown: bool
    """Whether the report draws it; the table has all."""
    widths: list[int]
    """Coordinates where it is measured, at each rung: a layer's own width."""
    sizes: list[list[list[float]]]
    """Mean absolute value: rung, seed, step (from 0, the start, to the last)."""
    changes: list[list[list[float]]]
    """Mean absolute difference to the start: rung, seed, step (from 1)."""
    start: Slope
    """Of the size before the first step."""
    end: Slope
    """Of the size after the last step."""
    change: Slope
    """Of the change after the last step."""


class Coordinates(TypedDict):
    """`results.json` of a coordinate check."""

    format: str
    created: str
    """ISO 8601, UTC."""
    command: str
    config: dict[str, Any]
    environment: dict[str, Any]
    data: str
    data_fingerprint: str
    family: str
    rungs: list[Rung]
    base_width: int | None
    """Where the logits' divisor and the blocks' rate hold; None: at every width."""
    seeds: list[int]
    steps: int
    learning_rate: float
    """Constant, without warm-up."""
    probe_tokens: int
    """Held-out tokens on which everything is measured."""
    tolerance: float
    """A slope within +- this counts as flat."""
    quantities: list[Quantity]
    summary: list[str]
    """The verdicts counted, in words."""


class GridPoint(TypedDict):
    """One learning rate at one rung."""

    learning_rate: float
    losses: list[float | None]
    """Final held-out loss of each seed; None: it became non-finite."""
    mean: float | None
    """None: a seed diverged, and the rate is out of question."""
    not_worse: bool
    """Whether it is the best rate, or its paired difference to it has an interval that reaches zero."""


class TunedRung(TypedDict):
    """One width of a family, tuned over the grid."""

    rung: Rung
    tokens_per_parameter: float
    """Training tokens per non-embedding parameter."""
    points: list[GridPoint]
    """By rising rate."""
    best: float
    """The rate of the lowest mean."""
    best_by_seed: list[float]
    at_edge: bool
    """The best is the lowest or highest that was tried: the optimum may lie outside."""


class Move(TypedDict):
    """From one rung to the next: where the best rate goes, and what keeping the smaller rung's would cost."""

    from_width: int
    to_width: int
    steps: int
    """Points of the grid from the smaller rung's best rate to the next one's; positive: to higher rates."""
    steps_by_seed: list[int]
    pairs: list[float | None]
    """Loss of the next rung at the smaller rung's best rate minus that at its own, seed by seed; None: diverged."""
    cost: float | None
    """Their mean; None: a seed diverged."""
    low: float | None
    """95 % interval (paired t)."""
    high: float | None
    verdict: Literal["same rate", "moved, no cost shown", "moved", "diverged", "edge of the grid", "one seed"]
    sentence: str


class TransferFamily(TypedDict):
    """One family over the ladder."""

    settings: dict[str, Any]
    rungs: list[TunedRung]
    moves: list[Move]


class Transfer(TypedDict):
    """`results.json` of a transfer check."""

    format: str
    created: str
    command: str
    config: dict[str, Any]
    environment: dict[str, Any]
    data: str
    data_fingerprint: str
    widths: list[int]
    base_width: int | None
    learning_rates: list[float]
    seeds: list[int]
    steps: int
    batch_tokens: int
    families: dict[str, TransferFamily]
