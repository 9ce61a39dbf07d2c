"""`entasis generate`: a trained model continues a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def generate(
    run: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")] = "",
    tokens: Annotated[int, typer.Option(help="Most tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0: from all.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
) -> None:
    """Continue a prompt with a trained model."""
    from entasis.generate.sample import generate_text
    from entasis.run.load import load_run

    loaded = load_run(run, report=lambda line: typer.echo(line, err=True))
    typer.echo(
        generate_text(
            loaded.model,
            loaded.tokenizer,
            prompt,
            tokens=tokens,
            temperature=temperature,
            top_k=top_k or None,
            seed=seed,
        )
    )
