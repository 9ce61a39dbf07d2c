"""`entasis checkpoint`: what checkpoints a run holds, whether they are whole, and one as a single file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from entasis.run.inventory import HeldCheckpoint

checkpoint = typer.Typer(help="Look at the checkpoints of a run.", rich_markup_mode=None, no_args_is_help=True)
_Path = Annotated[Path, typer.Argument(help="A run folder, or one checkpoint in it.", show_default=False)]


@checkpoint.command()
def ls(path: _Path) -> None:
    """List them: step, size, how the weights lie, and whether every file is as it was written."""
    from entasis.run.inventory import held_checkpoints

    for held in held_checkpoints(path):
        lie = f"{held.parts} part{'s' * (held.parts > 1)}" if held.parts else "whole"
        state = "good" if held.fault is None else "damaged"
        typer.echo(f"{held.path.name}  step {held.step:,}  {held.bytes / 2**20:,.1f} MiB  {lie}  {state}")


@checkpoint.command()
def verify(path: _Path) -> None:
    """Compare every file with its checksum; one line each, and status 1 if one is damaged."""
    from entasis.run.inventory import held_checkpoints

    faults = [_told(held) for held in held_checkpoints(path)]
    if any(faults):
        raise typer.Exit(1)


@checkpoint.command()
def convert(
    path: _Path,
    out: Annotated[Path, typer.Argument(help="The safetensors file to write.", show_default=False)],
) -> None:
    """Write the weights of a checkpoint, or of a run's newest good one, into a single safetensors file."""
    from entasis.run.inventory import single_file

    count, step, passed_over = single_file(path, out)
    for held in passed_over:
        _told(held)
    typer.echo(f"{out}: {count:,} weights of step {step:,}")


def _told(held: HeldCheckpoint) -> bool:
    """Says of a checkpoint whether it is good; whether it is not."""
    typer.echo(f"{held.path}: good" if held.fault is None else " ".join(held.fault.split()))
    return held.fault is not None
