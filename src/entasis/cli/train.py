"""`entasis train`: one model; started again, it goes on where it stopped. With --plan: what it would cost."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from entasis.errors import ConfigError

if TYPE_CHECKING:
    from entasis.run.config import RunConfig


def train(
    config: Annotated[str, typer.Argument(help="A configuration file (YAML), or a preset.", show_default=False)],
    setting: Annotated[
        list[str] | None, typer.Option("-s", "--set", help="Set a key, as train.steps=100. Repeatable.")
    ] = None,
    nproc: Annotated[
        int, typer.Option(min=1, help="Train with so many processes on this machine, one for each GPU.")
    ] = 1,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often to go back to the newest good checkpoint by itself after a failure.")
    ] = 0,
    plan: Annotated[bool, typer.Option("--plan", help="Print what it would cost, and train nothing.")] = False,
    accept_data_change: Annotated[
        bool, typer.Option("--accept-data-change", help="Go on though the data is not that of the checkpoint.")
    ] = False,
    on: Annotated[str | None, typer.Option(help="With --plan: the device.", show_default="H100")] = None,
    mfu: Annotated[
        float | None, typer.Option(help="With --plan: share of the device's peak that is reached.", show_default="0.4")
    ] = None,
) -> None:
    """Train one model; started again, it goes on where it stopped."""
    from entasis.run.config import load_config

    run_config = load_config(config, setting or [])
    if plan:
        typer.echo(_plan_text(run_config, on or "H100", 0.4 if mfu is None else mfu))
        return
    if on is not None or mfu is not None:
        raise ConfigError("--on, --mfu: they say what a plan is for; add --plan")
    if nproc > 1:
        from entasis.train.launch import launch

        arguments = ["train", config, *(part for each in setting or [] for part in ("-s", each))]
        if accept_data_change:
            arguments.append("--accept-data-change")
        launch(run_config, arguments, nproc, max_restarts=max_restarts)
        return
    if max_restarts and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("--max-restarts: all ranks have to start again together; give it to torchrun, or use --nproc")
    from rich.console import Console

    from entasis.train.launch import stop_without_launcher
    from entasis.train.restart import train_with_restarts

    stop_without_launcher()
    console = Console(quiet=os.environ.get("RANK", "0") != "0")  # of several processes, the first speaks
    train_with_restarts(run_config, console, max_restarts=max_restarts, accept_data_change=accept_data_change)
    console.print(f"done: {run_config.out}", markup=False, highlight=False, soft_wrap=True)


def _plan_text(config: RunConfig, on: str, mfu: float) -> str:
    from entasis.bench.plan import plan

    made = plan(config, on, mfu)
    held = f"{config.train.micro_batch} sequence{'s' * (config.train.micro_batch > 1)}"
    if config.train.activation_checkpointing != "none":
        held += f", activation checkpointing: {config.train.activation_checkpointing}"
    lines = []
    for run in made.runs:
        lines += [
            f"{run.name}",
            f"  parameters            {run.budget.parameters:,} stored, {run.budget.effective_parameters:,} effective",
            f"  steps                 {run.steps:,} of {config.train.batch_tokens:,} tokens",
            f"  tokens                {run.tokens:,} ({run.tokens_per_parameter:.1f} per non-embedding parameter)",
            f"  FLOPs                 {run.flops:.3e} ({run.budget.flops_per_token:,} per token, forward)",
            f"  memory                {run.state_bytes / 2**30:.2f} GiB weights, gradients, optimizer + about "
            f"{run.activation_bytes / 2**30:.2f} GiB activations ({held})",
            f"  hours                 {run.hours:.2f}",
        ]
    if made.repeats > 1:
        lines.append(f"{len(made.runs)} shapes x {made.repeats} runs each: {made.hours:.2f} hours in all")
    lines.append(f"hours on one device at {made.utilisation:.0%} of {made.device}")
    return "\n".join(lines)
