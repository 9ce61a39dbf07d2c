"""`entasis shape FAMILY --enumerate`: every prism schedule, or a grid of bowties, a line each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from entasis.errors import ConfigError

if TYPE_CHECKING:
    from entasis.shape.model_config import ModelConfig

_BOTTLENECKS = [0.2, 0.3, 0.4, 0.5, 0.7]


def list_shapes(family: str, settings: Mapping[str, Any], config: ModelConfig, guidelines: bool, as_json: bool) -> None:
    """Prints what there is to enumerate of a family.

    Raises:
        ConfigError: the family cannot be enumerated, or a setting is wrong.
    """
    kinds = {"prism": _prisms, "bowtie": _bowties}
    if family not in kinds:
        raise ConfigError(f"--enumerate: for {' and '.join(kinds)}, not for {family}")
    for record, line in kinds[family](dict(settings), config, guidelines):
        typer.echo(json.dumps(record) if as_json else line)


def _prisms(settings: dict[str, Any], _: ModelConfig, guidelines: bool) -> Iterator[tuple[dict[str, Any], str]]:
    from entasis.settings import check_arguments
    from entasis.shape.enumerate import prism_schedules

    dims = settings.pop("head_dim", None)
    request: dict[str, Any] = {"guidelines": guidelines}
    if dims is not None:
        request["head_dims"] = dims if isinstance(dims, list) else [dims]
    if "heads" in settings:
        request["baseline_heads"] = settings.pop("heads")
    names = ("width", "layers", "baseline_heads", "head_dims", "guidelines")
    checked = check_arguments(prism_schedules, settings | request, known=names, owner="prism --enumerate")
    for schedule in prism_schedules(**checked):
        yield {"heads": schedule}, ",".join(map(str, schedule))


def _bowties(settings: dict[str, Any], config: ModelConfig, _: bool) -> Iterator[tuple[dict[str, Any], str]]:
    from entasis.shape.budget import budget
    from entasis.shape.enumerate import bowtie_grid

    layers = settings.get("layers")
    if not isinstance(layers, int):
        raise ConfigError("layers: missing; a grid of bowties needs to know how many")
    bottlenecks = _list(settings.pop("bottleneck", _BOTTLENECKS))
    turns = _list(settings.pop("turn", range(2, max(3, layers))))
    for point in bowtie_grid(settings, bottlenecks, turns, config):
        record: dict[str, Any] = {"bottleneck": point.bottleneck, "turn": point.turn}
        line = f"bottleneck {point.bottleneck:<5g} turn {point.turn:>3}  "
        if point.design is None:
            yield record | {"reason": point.reason}, line + point.reason
            continue
        ratio = budget(point.design.shape, config).ratio_to(budget(point.design.reference, config))
        errors = [str(finding) for finding in point.design.findings if finding.level == "error"]
        widths = [layer.width for layer in point.design.shape.layers]
        numbers = "  ".join(
            f"{label} {ratio[field]:.3f}"
            for label, field in (
                ("effective", "effective_parameters"),
                ("FLOPs", "flops_per_token"),
                ("KV", "kv_cache_bytes_per_token"),
            )
        )
        yield (
            record | {"widths": widths, "ratio": ratio, "errors": errors},
            f"{line}{numbers}  {' '.join(map(str, widths))}" + (f"  error: {errors[0]}" if errors else ""),
        )


def _list(value: Any) -> Sequence[Any]:  # noqa: ANN401 - a number or several
    return value if isinstance(value, Sequence) else [value]
