"""How the experts of a shape are used: a map of layers by experts, and the same in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from entasis.report.numbers import significant
from entasis.report.schema import RunResult

_WIDTH, _LABELS = 360.0, 24.0
_CELL = 26.0
"""Largest side of a cell."""
_LOWEST_CELL = 9.0
_DARKEST = 2.0
"""Multiple of an even share that has the full colour, unless one is higher."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One expert."""

    x: str
    opacity: str
    title: str


@dataclass(frozen=True, slots=True)
class Row:
    """One layer."""

    layer: int
    y: str
    text_y: str
    cells: list[Cell]


@dataclass(frozen=True, slots=True)
class Extremes:
    """The least and the most used expert of one layer of one run."""

    seed: int
    layer: int
    experts: int
    least: int
    least_load: str
    most: int
    most_load: str


@dataclass(frozen=True, slots=True)
class ExpertMap:
    """Everything that a page says of a shape's experts. Loads are multiples of an even share."""

    seed: int
    """Of the run that is drawn."""
    rows: list[Row]
    width: str
    height: str
    label_x: str
    cell_width: str
    cell_height: str
    scale: list[tuple[str, str]]
    """Load and opacity."""
    label: str
    words: str
    extremes: list[Extremes]


def expert_map(runs: Sequence[RunResult]) -> ExpertMap | None:
    """The map of the first run, and the extremes of all; None without experts."""
    loaded = [run for run in runs if run.get("expert_load")]  # absent in results of before there were experts
    if not loaded:
        return None
    loads = [(layer["layer"], _multiples(layer["shares"])) for layer in loaded[0]["expert_load"]]
    darkest = max(_DARKEST, *(load for _, row in loads for load in row))
    most = max(len(row) for _, row in loads)
    cell_width = min(_CELL, (_WIDTH - _LABELS) / most)
    cell_height = min(_CELL, max(_LOWEST_CELL, 300 / len(loads)))
    rows = []
    for number, (layer, row) in enumerate(loads):
        top = (len(loads) - 1 - number) * cell_height  # the first layer is at the bottom
        cells = [
            Cell(
                f"{_LABELS + expert * cell_width:g}",
                f"{load / darkest:.3f}",
                f"layer {layer}, expert {expert + 1}: {_load(load)}",
            )
            for expert, load in enumerate(row)
        ]
        rows.append(Row(layer, f"{top:g}", f"{top + cell_height / 2 + 3.5:g}", cells))
    extremes = [
        _extremes(run["seed"], layer["layer"], layer["shares"]) for run in loaded for layer in run["expert_load"]
    ]
    return ExpertMap(
        seed=loaded[0]["seed"],
        rows=rows,
        width=f"{_WIDTH:g}",
        height=f"{len(rows) * cell_height:g}",
        label_x=f"{_LABELS - 6:g}",
        cell_width=f"{cell_width:g}",
        cell_height=f"{cell_height:g}",
        scale=[("none", "0"), ("even", f"{1 / darkest:.3f}"), (_load(darkest), "1")],
        label=f"load of the experts of layers {', '.join(str(layer) for layer, _ in loads)}",
        words=_words(loaded),
        extremes=extremes,
    )


def _multiples(shares: Sequence[float]) -> list[float]:
    return [share * len(shares) for share in shares]


def _load(multiple: float) -> str:
    return f"{significant(multiple, 3 if multiple >= 1 else 2)}×"


def _extremes(seed: int, layer: int, shares: Sequence[float]) -> Extremes:
    loads = _multiples(shares)
    low, high = min(loads), max(loads)
    least, most = loads.index(low) + 1, loads.index(high) + 1
    return Extremes(seed, layer, len(loads), least, _load(low), most, _load(high))


def _words(runs: Sequence[RunResult]) -> str:
    """The least and the most used expert of all layers and seeds, and how many got nothing."""
    every = [
        (load, f"expert {expert} of layer {layer['layer']}, seed {run['seed']}")
        for run in runs
        for layer in run["expert_load"]
        for expert, load in enumerate(_multiples(layer["shares"]), start=1)
    ]
    (low, least), (high, most) = min(every), max(every)
    unused = sum(load == 0 for load, _ in every)
    text = f"the most used is {most}, with {_load(high)} an even share; the least used is {least}, with {_load(low)}."
    return text + (f" {unused} of {len(every)} experts, over layers and seeds, got no token." if unused else "")
