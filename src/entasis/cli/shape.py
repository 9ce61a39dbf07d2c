"""`entasis shape`: a shape by name or by hand, drawn and counted before a step is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from entasis.errors import ConfigError, ShapeError

if TYPE_CHECKING:
    from entasis.shape.model_config import ModelConfig
    from entasis.shape.registry import Design


def shape(
    context_: typer.Context,
    family: Annotated[
        str | None,
        typer.Argument(
            help="A family, a preset, a run's configuration, or a .yaml or .json file with a shape.", show_default=False
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers.")] = None,
    width: Annotated[int | None, typer.Option(help="Reference width.")] = None,
    heads: Annotated[str | None, typer.Option(help="Query heads, or a list with one per layer: 3,3,6,6.")] = None,
    kv_heads: Annotated[str | None, typer.Option(help="Key/value heads, or a list.")] = None,
    baseline_heads: Annotated[int | None, typer.Option(help="Heads of a prism's baseline.")] = None,
    head_dim: Annotated[str | None, typer.Option(help="Width of a head.")] = None,
    mlp_ratio: Annotated[float | None, typer.Option(help="MLP hidden units per coordinate of width.")] = None,
    mlp_hidden: Annotated[int | None, typer.Option(help="MLP hidden units.")] = None,
    bottleneck: Annotated[str | None, typer.Option(help="A bowtie's narrowest width / reference width.")] = None,
    turn: Annotated[str | None, typer.Option(help="A bowtie's narrowest layer, counted from 1.")] = None,
    multiple: Annotated[int | None, typer.Option(help="Widths are rounded to multiples of this.")] = None,
    head_dim_multiple: Annotated[int | None, typer.Option(help="Head dims are rounded to multiples of this.")] = None,
    mlp_multiple: Annotated[int | None, typer.Option(help="MLP hidden units are rounded to multiples of this.")] = None,
    match: Annotated[str | None, typer.Option(help="Budget kept equal: effective, parameters, flops, kv.")] = None,
    style: Annotated[Literal["gpt2", "llama"], typer.Option(help="Block style.")] = "llama",
    vocab: Annotated[int, typer.Option(help="Vocabulary size.")] = 50_257,
    context: Annotated[int, typer.Option(help="Context in tokens.")] = 1024,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    list_families: Annotated[bool, typer.Option("--list", help="List the families and their settings.")] = False,
    plugin: Annotated[list[str] | None, typer.Option(help="A Python file with families. Repeatable.")] = None,
    enumerate_all: Annotated[
        bool,
        typer.Option(
            "--enumerate", help="List every prism schedule, or every bowtie of lists of bottlenecks and turns."
        ),
    ] = False,
    guidelines: Annotated[bool, typer.Option(help="Enumerate only schedules that keep Prism's guidelines.")] = True,
) -> None:
    """Design a shape: draw it, count its cost, check it against the rules.

    Every setting of a family is an option, also those that are not listed here (`entasis shape --list` names them).
    """
    from entasis.shape.model_config import ModelConfig

    for file in plugin or []:
        from entasis.shape.plugins import load_plugin

        load_plugin(file)
    if list_families:
        typer.echo(_families())
        return
    if family is None:
        raise ConfigError("family: missing; name one, or see `entasis shape --list`")
    if family.startswith("-"):
        raise ConfigError(f"{family}: the family comes before its settings, as `entasis shape bowtie {family} ...`")
    given = {
        "layers": layers,
        "width": width,
        "heads": _numbers("heads", heads),
        "kv_heads": _numbers("kv_heads", kv_heads),
        "baseline_heads": baseline_heads,
        "head_dim": _numbers("head_dim", head_dim),
        "mlp_ratio": mlp_ratio,
        "mlp_hidden": mlp_hidden,
        "bottleneck": _numbers("bottleneck", bottleneck),
        "turn": _numbers("turn", turn),
        "multiple": multiple,
        "head_dim_multiple": head_dim_multiple,
        "mlp_multiple": mlp_multiple,
        "match": match,
    }
    settings = {name: value for name, value in given.items() if value is not None} | _further(context_.args)
    config = ModelConfig(vocab, context, style)
    if enumerate_all:
        from entasis.cli.enumerate import list_shapes

        list_shapes(family, settings, config, guidelines, as_json)
        return
    if Path(family).suffix in {".yaml", ".yml", ".json"} and not _is_run(Path(family)):
        family, settings = _read(Path(family), settings)
    else:
        family, settings, config = _preset(family, settings, config)
    failed = _show(family, settings, config, as_json)
    if failed:
        raise typer.Exit(1)


def _show(family: str, settings: dict[str, Any], config: ModelConfig, as_json: bool) -> bool:
    """Prints the design; True if the rules found an error."""
    from entasis.shape import draw
    from entasis.shape.budget import budget
    from entasis.shape.families import design

    try:
        made = design(family, settings, config)
    except ShapeError as error:
        if not as_json:
            raise
        typer.echo(json.dumps(_empty_json(family, error)))
        return True
    failed = any(finding.level == "error" for finding in made.findings)
    if as_json:
        typer.echo(json.dumps(_as_json(made, config)))
        return failed
    typer.echo(draw.silhouette(made.shape))
    if config.resize != "carry":
        typer.echo(f"      between widths: {config.resize}, an ablation; coordinates are carried by default")
    typer.echo()
    typer.echo(draw.budget_table(budget(made.shape, config), budget(made.reference, config)))
    if made.findings:
        typer.echo()
        typer.echo(draw.findings_text(made.findings))
    return failed


def _as_json(made: Design, config: ModelConfig) -> dict[str, Any]:
    from entasis.shape.budget import budget

    mine, reference = budget(made.shape, config), budget(made.reference, config)
    return {
        "family": made.family,
        **made.shape.to_dict(),
        "budget": mine.to_dict(),
        "uniform": reference.to_dict(),
        "ratio": mine.ratio_to(reference),
        "findings": [{"level": f.level, "layer": f.layer, "message": f.message} for f in made.findings],
    }


def _empty_json(family: str, error: ShapeError) -> dict[str, Any]:
    """The same object where no shape exists, so that a reader of the JSON finds the reason in its place."""
    fields = dict.fromkeys(("embed_width", "unembed_width", "budget", "uniform", "ratio"))
    finding = {"level": "error", "layer": error.layer, "message": error.message}
    return {"family": family, "layers": [], **fields, "findings": [finding]}


def _read(path: Path, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A file holds a family with its settings, or a shape written out; settings on the command line win."""
    from entasis.settings import read_yaml

    data = read_yaml(path)
    family = data.pop("family", "explicit")
    if not isinstance(family, str):
        raise ConfigError(f"{path}: family: expected a name, got {family!r}")
    return family, data | settings


def _numbers(name: str, text: str | None) -> float | list[float] | None:
    """`12` or `0.3`, or a list written `3,3,6,6`; whole numbers stay whole."""
    if text is None:
        return None
    try:
        numbers = [int(part) if part.strip().lstrip("+-").isdigit() else float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name}: expected a number or a list like 3,3,6,6; got {text!r}") from None
    return numbers if "," in text else numbers[0]


def _further(arguments: list[str]) -> dict[str, Any]:
    """Settings of a family that this command has no option of its own for: `--early-head-dim 256`."""
    from entasis.settings import parse_yaml

    settings: dict[str, Any] = {}
    rest = iter(arguments)
    for argument in rest:
        option, equals, text = argument.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or not name.isidentifier():
            raise ConfigError(f"{argument}: expected an option and its value, as --multiple 32")
        value = text if equals else next(rest, None)
        if value is None:
            raise ConfigError(f"{name}: its value is missing")
        settings[name] = _numbers(name, value) if "," in value else parse_yaml(value, option)
    return settings


def _is_run(path: Path) -> bool:
    """Whether a file is the configuration of a run, and not of a shape alone."""
    from entasis.settings import read_yaml

    return bool({"train", "inherits"} & read_yaml(path).keys())


def _preset(name: str, settings: dict[str, Any], config: ModelConfig) -> tuple[str, dict[str, Any], ModelConfig]:
    """The family, settings and block of a preset or a run's configuration, with the command line's settings over them;
    a family's name as it is."""
    from entasis.run.presets import preset_names

    if name not in preset_names() and not Path(name).suffix:
        return name, settings, config
    from entasis.run.config import load_config

    preset = load_config(name)
    merged = {**preset.shape, **settings}
    return str(merged.pop("family")), merged, preset.block(preset.data.vocab_size or config.vocab_size)


def _families() -> str:
    import inspect

    from entasis.run.presets import preset_names, preset_summary
    from entasis.shape.families import families, family_settings

    lines = ["families"]
    known = families()
    column = 2 + max(map(len, known))
    for name, build in known.items():
        summary = (inspect.getdoc(build) or "no description").splitlines()[0]
        lines += [f"{name:<{column}}{summary}", f"{'':<{column}}settings: {', '.join(family_settings(name))}"]
    lines += ["", "presets"]
    column = 2 + max(map(len, preset_names()))
    lines += [f"{name:<{column}}{preset_summary(name)}" for name in preset_names()]
    return "\n".join(lines)
