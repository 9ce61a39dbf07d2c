"""`entasis train`: one model; started again, it goes on where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    config: Annotated[Path, typer.Argument(help="A configuration file (YAML).", show_default=False)],
    setting: Annotated[
        list[str] | None, typer.Option("-s", "--set", help="Set a key, as train.steps=100. Repeatable.")
    ] = None,
) -> None:
    """Train one model; started again, it goes on where it stopped."""
    from rich.console import Console

    from entasis.run.config import load_config

    run_config = load_config(config, setting or [])
    from entasis.train.loop import train as train_run

    console = Console()
    train_run(run_config, console)
    console.print(f"done: {run_config.out}", markup=False, highlight=False, soft_wrap=True)
