"""The command line: one small file per command; every error becomes one line and an exit status.

0: done. 1: failed. 2: wrong usage or configuration. 75: stopped by a scheduler, and may be started again. The files of
the commands import nothing heavy at the top, so that `entasis --help` answers at once.
"""

from __future__ import annotations

import sys

import typer

from entasis import __version__
from entasis.cli.checkpoint import checkpoint
from entasis.cli.compare import compare
from entasis.cli.coordinates import coordinates
from entasis.cli.data import data
from entasis.cli.generate import generate
from entasis.cli.prepare import prepare
from entasis.cli.shape import shape
from entasis.cli.train import train
from entasis.cli.transfer import transfer
from entasis.errors import EntasisError

app = typer.Typer(
    name="entasis",
    help="Design, pretrain and compare transformer language models whose shape changes with depth.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
# Settings of any family, also of one that a person registers, are options of `shape`.
app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(shape)
for command in (prepare, train, compare, coordinates, transfer, generate):
    app.command()(command)
app.add_typer(data, name="data")
app.add_typer(checkpoint, name="checkpoint")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"entasis {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks (accepted anywhere on the line)."),
) -> None:
    """Design, pretrain and compare transformer language models whose shape changes with depth."""


def run_command(arguments: list[str]) -> int:
    """Runs a command line (without the program's name) and returns its exit status."""
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        status = app(args=arguments or ["--help"], prog_name="entasis", standalone_mode=False)
    except Exception as error:  # the one place where anything may arrive: a user never sees a traceback unasked
        if debug:
            raise
        message, status = _explain(error)
        print(f"error: {message}", file=sys.stderr)
    return status if isinstance(status, int) else 0


def _explain(error: Exception) -> tuple[str, int]:  # noqa: PLR0911 - a table of kinds
    """The one line for the user, and the exit status."""
    if isinstance(error, EntasisError):
        return " ".join(str(error).split()), error.exit_status
    if hasattr(error, "format_message"):  # wrong usage; some versions of typer carry their own copy of click's classes
        return " ".join(error.format_message().replace("Value error, ", "").split()), 2
    if isinstance(error, typer.Abort):
        return "interrupted", 130
    if isinstance(error, BrokenPipeError):
        return "nobody reads the output any more", 1
    if isinstance(error, RuntimeError) and ("allocate" in str(error) or "out of memory" in str(error).lower()):
        return "not enough memory: make the shape smaller, or lower train.micro_batch", 1
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {(error.strerror or str(error)).lower()}", 1
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower(), 1
    text = " ".join(str(error).split())
    return f"unexpected {type(error).__name__}: {text} (run again with --debug for the traceback)", 1
