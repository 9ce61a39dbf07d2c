"""`entasis coordinates`: do activations keep their size when the model grows wider? The check of a parametrisation."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from entasis.cli.alone import require_alone


def coordinates(
    config: Annotated[str, typer.Argument(help="A configuration file (YAML), or a preset.", show_default=False)],
    setting: Annotated[
        list[str] | None, typer.Option("-s", "--set", help="Set a key, as shape.family=bowtie. Repeatable.")
    ] = None,
    widths: Annotated[str, typer.Option(help="In the place of shape.width, rising.")] = "64,128,256",
    steps: Annotated[int, typer.Option(help="Optimizer steps of each model.")] = 5,
    seeds: Annotated[int, typer.Option(help="Models of each width; the seeds count from train.seed.")] = 3,
    base_width: Annotated[
        int | None,
        typer.Option(
            help="Width at which model.logit_divisor and optimizer.block_rate hold; elsewhere they follow the width "
            "(muP). Not given: the same at every width, as published."
        ),
    ] = None,
    flat: Annotated[float, typer.Option(help="Largest slope that counts as flat.")] = 0.1,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results; `out` of the configuration + -coordinates unless given.")
    ] = None,
) -> None:
    """Measure activations against width, at the start and over a few steps, and draw them."""
    require_alone("coordinates", "start it alone")
    from rich.console import Console

    from entasis.errors import ConfigError
    from entasis.run.config import load_config

    try:
        sizes = [int(width) for width in widths.split(",")]
    except ValueError:
        raise ConfigError(f"--widths: expected whole numbers with commas between them, got {widths!r}") from None
    if base_width is not None and base_width < 1:
        raise ConfigError(f"--base-width: expected a width above 0, got {base_width}")
    if not flat > 0:
        raise ConfigError(f"--flat: expected a slope above 0, got {flat:g}")
    run_config = load_config(config, setting or [])
    folder = Path(f"{run_config.out}-coordinates") if out is None else out
    words = ["entasis", "coordinates", config, *(word for each in setting or [] for word in ("-s", each))]
    words += ["--widths", widths, "--steps", str(steps), "--seeds", str(seeds), "--flat", f"{flat:g}"]
    words += [] if base_width is None else ["--base-width", str(base_width)]
    words += [] if out is None else ["--out", str(out)]
    from entasis.study.coordinates import coordinates as check_coordinates

    results = check_coordinates(
        run_config,
        Console(),
        command=shlex.join(words),
        widths=sizes,
        steps=steps,
        seeds=seeds,
        folder=folder,
        base_width=base_width,
        tolerance=flat,
    )
    for sentence in results["summary"]:
        typer.echo(sentence)
    typer.echo(folder / "report.html")  # alone on the last line, for scripts
