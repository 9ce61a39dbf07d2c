"""Trials: runs of which the final held-out loss is wanted, and that may diverge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from entasis.run.files import write_json
from entasis.run.folder import RunFolder
from entasis.study.workers import Job, train_jobs


def final_losses(jobs: Sequence[Job], console: Console, *, workers: int) -> list[float | None]:
    """The held-out loss after the last step of each run, which is trained as far as it is not done; None: it diverged.

    That a run diverged stands in its folder, so that it is not tried again. One of another configuration is, and is
    refused if the run folder does not allow the change.

    Raises:
        ConfigError: a folder holds a run that was trained or evaluated otherwise.
        Interrupted: a signal asked to stop; the state of every run is saved.
    """
    due = [
        job
        for job in jobs
        if not _diverged(job).exists() or RunFolder(Path(job.config.out)).read_config() != job.config
    ]
    for number, divergence in train_jobs(due, console, workers=workers):
        if divergence is None:
            _diverged(due[number]).unlink(missing_ok=True)
        else:
            write_json(_diverged(due[number]), {"message": str(divergence)})
            console.print(str(divergence), markup=False, highlight=False, soft_wrap=True)
    return [None if _diverged(job).exists() else _final_loss(job) for job in jobs]


def _diverged(job: Job) -> Path:
    """The file that says that a trial's loss became non-finite."""
    return Path(job.config.out) / "diverged.json"


def _final_loss(job: Job) -> float:
    loss: float = RunFolder(Path(job.config.out)).read_metrics()[-1]["val_loss"]
    return loss
