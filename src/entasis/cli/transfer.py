"""`entasis transfer`: is the best learning rate of a width also the best of the next?"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from entasis.cli.alone import require_alone


def transfer(
    config: Annotated[Path, typer.Argument(help="A configuration file with a transfer section.", show_default=False)],
    setting: Annotated[
        list[str] | None, typer.Option("-s", "--set", help="Set a key, as transfer.seeds=[0,1]. Repeatable.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Runs to train at once, each in a process.")] = 1,
) -> None:
    """Tune each shape at several widths over one grid of learning rates, and say where the best rate goes."""
    require_alone("transfer", "start it alone, with --workers N to train N runs at once")
    from rich.console import Console

    from entasis.run.config import load_config

    run_config = load_config(config, setting or [])
    from entasis.study.transfer import transfer as check_transfer

    words = ["entasis", "transfer", str(config), *(word for each in setting or [] for word in ("-s", each))]
    command = shlex.join([*words, *(["--workers", str(workers)] if workers > 1 else [])])
    results = check_transfer(run_config, Console(), command=command, workers=workers)
    for family in results["families"].values():
        for move in family["moves"]:
            typer.echo(move["sentence"])
    typer.echo(Path(run_config.out) / "report.html")  # alone on the last line, for scripts
