"""The coordinate check: how large activations are, and how much a few steps change them, at several widths.

Where a parametrisation transfers, neither depends on the width. Models of several widths and seeds are trained for a
few steps at a constant rate, and everything is measured on the same held-out windows before the first step and after
each.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor, nn

from entasis.data.dataset import TokenSource
from entasis.data.stream import Batch, BatchStream, held_out_batches
from entasis.errors import ConfigError
from entasis.model.device import Computation, choose_computation
from entasis.model.language_loss import LanguageLoss
from entasis.model.transformer import Transformer
from entasis.report.coordinates import write_coordinates
from entasis.report.numbers import signed
from entasis.report.scaling_schema import COORDINATES_FORMAT, Coordinates, Quantity, Rung, Slope
from entasis.run.checkpoint import NonFiniteError
from entasis.run.config import RunConfig
from entasis.run.environment import environment_record
from entasis.run.files import write_json
from entasis.run.folder import RunFolder
from entasis.run.objective import masking
from entasis.run.open_data import open_data
from entasis.settings import shorten
from entasis.shape.budget import budget
from entasis.shape.records import Shape
from entasis.study.rungs import require_ladder, rung
from entasis.study.slopes import slope
from entasis.train.optimizer import Optimizer
from entasis.train.router import RouterStep

_PROBE_TOKENS = 1024
"""At least one window."""

Kind = Literal["embedding", "attention", "mlp", "stream", "logits"]
_Place = tuple[Kind, int | None]
_PHASES: tuple[tuple[Literal["start", "end", "change"], str], ...] = (
    ("start", "size at the start"),
    ("end", "size after the last step"),
    ("change", "change after the last step"),
)
_LISTED = 3
"""Quantities that a line names; of more it gives the range."""
_VERDICTS = {
    "flat": "flat",
    "grows": "growing",
    "shrinks": "shrinking",
    "undecided": "undecided",
    "one seed": "of one seed, without interval",
    "no slope": "without a slope",
}
"""In the order of a summary, with its word for several."""


def coordinates(
    config: RunConfig,
    console: Console,
    *,
    command: str,
    widths: Sequence[int],
    steps: int,
    seeds: int,
    folder: Path,
    base_width: int | None = None,
    tolerance: float = 0.1,
) -> Coordinates:
    """Checks the shape of `config` at the given widths and writes `results.json` and `report.html` into `folder`.

    Args:
        config: its rate is kept constant, its schedule is not read.
        console: where progress is shown.
        command: the command that repeats the check.
        widths: in the place of `shape.width`, rising.
        steps: optimizer steps of each model.
        seeds: how many, from `train.seed` on.
        folder: of the results; no run's.
        base_width: as for `rung`.
        tolerance: largest slope that counts as flat.

    Raises:
        ConfigError: the widths make no ladder, or the folder holds a run.
        NonFiniteError: a gradient or an activation was not finite; the line names width, seed and step.
    """
    require_ladder("--widths", widths)
    if steps < 1 or seeds < 1:
        raise ConfigError(f"--steps {steps}, --seeds {seeds}: expected at least 1 of each")
    rungs = [rung(config, width, base_width) for width in widths]
    RunFolder(folder).require_study("--out")
    _require_same_check(folder / "results.json", command)
    computation = choose_computation(config.train.device, config.train.precision, config.train.threads)
    data = open_data(config.data)
    probe = _probe(config, data)
    numbers = range(config.train.seed, config.train.seed + seeds)
    with RunFolder(folder).locked():
        shapes = [each.design(data.vocab_size).shape for each in rungs]
        places: list[_Place] = []
        measured: list[list[list[dict[_Place, tuple[float, float]]]]] = []
        for each, shape in zip(rungs, shapes, strict=True):
            measured.append([])
            for seed in numbers:
                label = f"width {each.shape['width']}, seed {seed}"
                console.print(label, markup=False, highlight=False)
                records = _measured(each, shape, data, probe, computation, seed=seed, steps=steps, label=label)
                places = places or list(records[0])
                measured[-1].append(records)
        shown = _shown_layers(shapes[-1])
        quantities = [_quantity(place, shapes, measured, tolerance, shown) for place in places]
        results = Coordinates(
            format=COORDINATES_FORMAT,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=command,
            config=config.model_dump(mode="json"),
            environment=environment_record(computation.device),
            data=data.name,
            data_fingerprint=data.fingerprint,
            family=str(config.shape["family"]),
            rungs=[rung_record(each, data.vocab_size) for each in rungs],
            base_width=base_width,
            seeds=list(numbers),
            steps=steps,
            learning_rate=config.optimizer.learning_rate,
            probe_tokens=probe.tokens.size,
            tolerance=tolerance,
            quantities=quantities,
            summary=[_summary(words, [(each["name"], each[phase]) for each in quantities]) for phase, words in _PHASES],
        )
        write_json(folder / "results.json", results)
        write_coordinates(results, folder / "report.html")
    return results


def _require_same_check(file: Path, command: str) -> None:
    if not file.exists():
        return
    try:
        before = json.loads(file.read_text(encoding="utf-8"))["command"]
    except (OSError, ValueError, KeyError, TypeError):
        before = "something else"
    if before != command:
        raise ConfigError(
            f"--out: {file} holds the results of another check ({shorten(before)}); choose another folder, or remove it"
        )


def rung_record(config: RunConfig, vocab_size: int) -> Rung:
    """What a rung is, as results keep it."""
    shape = config.design(vocab_size).shape
    return Rung(
        width=config.shape["width"],
        shape=shape.to_dict(),
        parameters=budget(shape, config.block(vocab_size)).parameters,
        logit_divisor=config.model.logit_divisor,
        block_rate=config.optimizer.block_rate,
    )


def _probe(config: RunConfig, data: TokenSource) -> Batch:
    context = config.model.context
    (batch,) = held_out_batches(
        data.held_out,
        context=context,
        batch_sequences=max(1, _PROBE_TOKENS // context),
        tokens=_PROBE_TOKENS,
        document_mask=config.data.document_mask,
        eos_id=data.eos_id,
        masking=masking(config, data),
    )
    return batch


def _measured(
    config: RunConfig,
    shape: Shape,
    data: TokenSource,
    probe: Batch,
    computation: Computation,
    *,
    seed: int,
    steps: int,
    label: str,
) -> list[dict[_Place, tuple[float, float]]]:
    """Size and change at each place before the first step and after each, of one model."""
    model = Transformer(shape, config.block(data.vocab_size), seed=seed).to(computation.device)
    optimizer = Optimizer(model, config.optimizer)
    stream = BatchStream(
        data.train,
        context=config.model.context,
        batch_sequences=config.batch_sequences,
        seed=seed,
        document_mask=config.data.document_mask,
        eos_id=data.eos_id,
        masking=masking(config, data),
    )
    start = _activations(model, probe, computation)
    records = [{place: (_size(state), 0.0) for place, state in start.items()}]
    for step in range(steps):
        _train_step(model, optimizer, stream.batch(step), config, computation, label=f"{label}, step {step + 1}")
        now = _activations(model, probe, computation)
        records.append({place: (_size(state), _size(state - start[place])) for place, state in now.items()})
        if not all(map(math.isfinite, itertools.chain.from_iterable(records[-1].values()))):
            raise NonFiniteError(
                f"{label}: an activation is not finite after step {step + 1}; lower optimizer.learning_rate"
            )
    return records


@torch.no_grad()
def _activations(model: Transformer, batch: Batch, computation: Computation) -> dict[_Place, Tensor]:
    """What enters the stream, each sub-layer's update, the stream after each layer (its prefix), and the logits."""
    found: dict[_Place, Tensor] = {}

    def keeps(place: _Place, factor: float = 1.0) -> Callable[..., None]:
        def hook(_: nn.Module, __: object, output: Any) -> None:  # noqa: ANN401 - experts give a pair
            state = output[0] if isinstance(output, tuple) else output
            found[place] = state.float() * factor

        return hook

    hooks = [model.embed.register_forward_hook(keeps(("embedding", None), model.config.embedding_multiplier))]
    for number, (_, block) in enumerate(model.blocks(), start=1):
        if block.attention is not None:
            hooks.append(block.attention.register_forward_hook(keeps(("attention", number))))
        if block.mlp is not None:
            hooks.append(block.mlp.register_forward_hook(keeps(("mlp", number))))
        hooks.append(block.register_forward_hook(keeps(("stream", number))))
    documents = None if batch.documents is None else computation.tensor(batch.documents)
    try:
        with computation.autocast():
            found["logits", None] = model(computation.tensor(batch.tokens), documents).float()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _size(state: Tensor) -> float:
    return state.abs().mean().item()


def _train_step(
    model: Transformer, optimizer: Optimizer, batch: Batch, config: RunConfig, computation: Computation, *, label: str
) -> None:
    """One update, as in training, at the configured rate."""
    summed_loss = LanguageLoss(model)
    routers = RouterStep(model.shape, config.train.router_loss, batch.tokens.size)
    for first in range(0, len(batch.tokens), config.train.micro_batch):
        part = batch.part(first, first + config.train.micro_batch)
        documents = None if part.documents is None else computation.tensor(part.documents)
        with computation.autocast():
            loss, routings = summed_loss(computation.tensor(part.tokens), computation.tensor(part.targets), documents)
        routers.added_to(loss / max(1, batch.counted), routings).backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip or math.inf)
    if not math.isfinite(norm.item()):
        raise NonFiniteError(f"{label}: gradient norm {norm.item():g}; lower optimizer.learning_rate")
    optimizer.step(config.optimizer.learning_rate)


def _shown_layers(shape: Shape) -> set[int]:
    """The first layer, the last, and the narrowest between them (the middle one where all are alike)."""
    count = len(shape.layers)
    middle = range(2, count) or range(1, count + 1)
    centre = (count + 1) / 2
    narrowest = min(middle, key=lambda number: (shape.layers[number - 1].width, abs(number - centre)))
    return {1, narrowest, count}


def _quantity(
    place: _Place,
    shapes: Sequence[Shape],
    measured: Sequence[Sequence[Sequence[dict[_Place, tuple[float, float]]]]],
    tolerance: float,
    shown: set[int],
) -> Quantity:
    kind, layer = place
    sizes = [[[record[place][0] for record in records] for records in seeds] for seeds in measured]
    changes = [[[record[place][1] for record in records[1:]] for records in seeds] for seeds in measured]
    widths = [_width(place, shape) for shape in shapes]

    def fitted(values: list[list[list[float]]], step: int) -> Slope:
        return slope(widths, [[seed[step] for seed in seeds] for seeds in values], tolerance)

    return Quantity(
        name=_name(place),
        kind=kind,
        layer=layer,
        shown=layer is None or layer in shown,
        widths=widths,
        sizes=sizes,
        changes=changes,
        start=fitted(sizes, 0),
        end=fitted(sizes, -1),
        change=fitted(changes, -1),
    )


def _width(place: _Place, shape: Shape) -> int:
    kind, layer = place
    if layer is not None:
        return shape.layers[layer - 1].width
    return shape.embed_width if kind == "embedding" else shape.head_width


def _name(place: _Place) -> str:
    kind, layer = place
    if layer is None:
        return kind
    return {"attention": f"attention {layer}", "mlp": f"MLP {layer}"}.get(kind, f"stream after {layer}")


def _summary(what: str, slopes: Sequence[tuple[str, Slope]]) -> str:
    """The verdicts of one phase in a line: how many of each, and the slopes of those that are not flat."""
    parts = []
    for verdict, word in _VERDICTS.items():
        found = [(name, each["mean"]) for name, each in slopes if each["verdict"] == verdict]
        if not found:
            continue
        means = [value for _, value in found if value is not None]
        listed = ""
        if len(found) <= _LISTED:
            listed = ", ".join(name if value is None else f"{name} {signed(value)}" for name, value in found)
        elif means:
            listed = f"slopes {signed(min(means))} to {signed(max(means))}"
        parts.append(f"{len(found)} {word}" + (f" ({listed})" if listed and verdict != "flat" else ""))
    return f"{what}, of {len(slopes)} quantities: {'; '.join(parts)}"
