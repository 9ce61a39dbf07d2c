"""`entasis prepare`: text to a folder of token shards."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.progress import TaskID

    from entasis.data.dataset import TokenData

_DEFAULT_SHARD_TOKENS = 100_000_000


def prepare(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Text: .txt (documents between blank lines) and .jsonl, each also .gz or .zst, .parquet, folders and "
            "globs of them; a named corpus: web-bible, kjv-bible; from the network: fineweb (its 10-billion-token "
            "sample), dclm (deduplicated), or any dataset as hf:OWNER/NAME[:CONFIG[:SPLIT]].",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to make.", show_default=False)],
    tokenizer: Annotated[
        str,
        typer.Option(
            help="bytes, bpe:N (trained on the training text), tiktoken:gpt2, tiktoken:cl100k_base, "
            "tiktoken:o200k_base, tiktoken:FOLDER with a rank file NAME.tiktoken, or a Hugging Face tokenizer file or "
            "folder."
        ),
    ] = "bytes",
    eos: Annotated[
        str | None, typer.Option(help="Token that ends a document, where the tokenizer file does not say.")
    ] = None,
    held_out: Annotated[float, typer.Option(help="Share of the documents that is held out.")] = 0.01,
    documents: Annotated[
        int | None,
        typer.Option(help="Take only the first so many documents of all sources together.", show_default=False),
    ] = None,
    text_field: Annotated[str, typer.Option(help="Field of a record, or column, that holds the text.")] = "text",
    processes: Annotated[
        int | None, typer.Option(help="Worker processes; by default as many as pay.", show_default=False)
    ] = None,
    shard_tokens: Annotated[int, typer.Option(help="Tokens per shard at most.")] = _DEFAULT_SHARD_TOKENS,
    if_missing: Annotated[bool, typer.Option("--if-missing", help="Do nothing if the folder holds this data.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace data that the folder holds.")] = False,
) -> None:
    """Turn text into token shards that `entasis train` reads."""
    from entasis.data.documents import Sources
    from entasis.data.prepare import Preparation, find_prepared, prepare_data
    from entasis.errors import ConfigError

    sources = Sources.find(tuple(source), text_field, documents)
    preparation = Preparation(sources, tokenizer, eos, held_out, shard_tokens)
    prepared = None if force else find_prepared(preparation, out)
    if prepared is not None:
        if not if_missing:
            raise ConfigError(f"--out: {out} holds this data already; --if-missing accepts it, --force makes it again")
        typer.echo(f"{out}: holds this data already ({prepared.manifest.train.tokens:,} training tokens)")
        return
    started = time.monotonic()
    with _Bar() as bar:
        data = prepare_data(preparation, out, processes=processes, replace=force, progress=bar.update)
    typer.echo(_summary(data, time.monotonic() - started))


class _Bar:
    """A progress bar on standard error with MB/s; silent unless that is a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description:<22}"),
            BarColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, what: str, done: int, total: int | None) -> None:
        """Show `done` of `total` bytes of text; a line for each thing that is done."""
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)


def _summary(data: TokenData, seconds: float) -> str:
    manifest = data.manifest
    train, held_out = manifest.train, manifest.held_out
    text_bytes, tokens = train.bytes + held_out.bytes, train.tokens + held_out.tokens
    documents = train.documents.count + held_out.documents.count
    one = manifest.held_out_by == "tail"
    lines = [
        f"{data.path}: {_count(1 if one else documents, 'document')}, {text_bytes / 1e6:,.2f} MB of text, "
        f"{tokens:,} tokens ({text_bytes / tokens:.2f} bytes each) in {seconds:.1f} s "
        f"({text_bytes / 1e6 / seconds:.1f} MB/s)",
        f"  tokenizer {manifest.tokenizer.name}: {manifest.vocab_size:,} ids, stored as {manifest.dtype}",
        f"  train {train.tokens:,} tokens in {_count(len(train.shards), 'shard')}; held out {held_out.tokens:,}, "
        + ("the tail of the only document" if one else _count(held_out.documents.count, "document")),
        f"  token frequencies alone: {manifest.unigram_bits_per_byte:.3f} bits per byte of held-out text",
    ]
    asked = manifest.tokenizer.name.removeprefix("bpe:")
    if asked.isdigit() and int(asked) > manifest.vocab_size:
        lines.append(f"  note: the text gave only {manifest.vocab_size:,} of {int(asked):,} tokens")
    for token, times in manifest.special_tokens_in_text.items():
        lines.append(f"  note: {token} stood in the text {times:,} times; it was encoded as ordinary text")
    if manifest.empty_documents:
        lines.append(f"  note: {_count(manifest.empty_documents, 'document')} without text left out")
    return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
