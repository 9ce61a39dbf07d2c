"""`entasis data`: looking at data that is there already."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from entasis.data.check import Finding

data = typer.Typer(help="Look at data that is there already.", rich_markup_mode=None, no_args_is_help=True)
_FORMATS = ("entasis", "nanogpt", "llmc", "megatron")


@data.callback()
def _group() -> None:
    """Look at data that is there already."""


@data.command()
def check(
    path: Annotated[
        list[str],
        typer.Argument(
            help="Prepared folders or addresses of them; with --format, files or globs.", show_default=False
        ),
    ],
    kind: Annotated[str, typer.Option("--format", help=f"Whose files these are: {', '.join(_FORMATS)}.")] = "entasis",
    vocab_size: Annotated[
        int | None, typer.Option(help="Other formats: ids at or above it are findings.", show_default=False)
    ] = None,
    eos_id: Annotated[
        int | None, typer.Option(help="megatron: the id with which every document must end.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list with file, message, offset and byte.")] = False,
) -> None:
    """Read every token and list what is truncated, corrupt, out of range or mismatched; status 1 if anything is."""
    from entasis.errors import ConfigError
    from entasis.settings import nearest

    if kind not in _FORMATS:
        raise ConfigError(f"--format: {kind!r} is unknown{nearest(kind, _FORMATS)}; known: {', '.join(_FORMATS)}")
    for name, value in (("--vocab-size", vocab_size), ("--eos-id", eos_id)):
        if kind == "entasis" and value is not None:
            raise ConfigError(f"{name}: a prepared folder says so itself; remove it, or give --format")
    findings: list[Finding] = []
    for each in path:
        before = len(findings)
        for finding in _findings(each, kind, vocab_size, eos_id):
            findings.append(finding)
            if not as_json:
                typer.echo(" ".join(finding.line.split()))
        if len(findings) == before and not as_json:
            typer.echo(f"{each}: nothing wrong" + _unchecked(kind, vocab_size))
    if as_json:
        records = [
            {"file": str(each.file), "message": each.line, "offset": each.offset, "byte": each.byte}
            for each in findings
        ]
        typer.echo(json.dumps(records, indent=1))
    if findings:
        raise typer.Exit(1)


def _findings(path: str, kind: str, vocab_size: int | None, eos_id: int | None) -> Iterator[Finding]:
    if kind == "entasis":
        from entasis.data.check import check_prepared
        from entasis.data.remote import fetch_prepared, is_remote

        folder = fetch_prepared(path, None, lambda line: typer.echo(line, err=True)) if is_remote(path) else Path(path)
        return check_prepared(folder)
    from entasis.data.check_foreign import check_foreign

    return check_foreign(kind, path, vocab_size, eos_id)  # type: ignore[arg-type]  # one of the formats, as checked


def _unchecked(kind: str, vocab_size: int | None) -> str:
    return "" if kind == "entasis" or vocab_size is not None else " (ids are not checked without --vocab-size)"
