"""`entasis compare`: several shapes at one budget, with paired seeds, and a report."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from entasis.cli.alone import require_alone


def compare(
    config: Annotated[Path, typer.Argument(help="A configuration file with a compare section.", show_default=False)],
    setting: Annotated[
        list[str] | None, typer.Option("-s", "--set", help="Set a key, as train.steps=100. Repeatable.")
    ] = None,
    allow_unequal: Annotated[bool, typer.Option(help="Compare although budgets differ by more than allowed.")] = False,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Runs to train at once, each in a process.")] = 1,
) -> None:
    """Train several shapes at one budget, with paired seeds, and write a report."""
    require_alone("compare", "start it alone, with --workers N to train N runs at once")
    from rich.console import Console

    from entasis.run.config import load_config

    run_config = load_config(config, setting or [])
    from entasis.study.compare import compare as compare_shapes

    console = Console()
    words = ["entasis", "compare", str(config), *(word for each in setting or [] for word in ("-s", each))]
    flags = [*(["--allow-unequal"] if allow_unequal else []), *(["--workers", str(workers)] if workers > 1 else [])]
    command = shlex.join([*words, *flags])
    results = compare_shapes(run_config, console, command=command, allow_unequal=allow_unequal, workers=workers)
    for shape in results["shapes"].values():
        if shape["difference"] is not None:
            typer.echo(shape["difference"]["sentence"])
    for contrast in results["contrasts"]:
        typer.echo(f"{contrast['name']}: {contrast['difference']['sentence']}")
    typer.echo(Path(run_config.out) / "report.html")  # alone on the last line, for scripts
