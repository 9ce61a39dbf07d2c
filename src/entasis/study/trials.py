"""A trial: one run of a study, trained to its end, of which the final held-out loss is wanted."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from entasis.errors import ConfigError
from entasis.run.checkpoint import NonFiniteError
from entasis.run.config import RunConfig
from entasis.run.files import write_json
from entasis.run.folder import RunFolder
from entasis.train.loop import train

_PROTOCOL = ("steps", "evaluate_tokens")
"""Settings of `train` that may change when one run goes on, but not between the trials of a study."""


def final_loss(config: RunConfig, console: Console, label: str) -> float | None:
    """The held-out loss after the last step of a run, which is trained as far as it is not done; None: it diverged.

    Raises:
        ConfigError: the folder holds a run that was trained or evaluated otherwise.
    """
    folder = RunFolder(Path(config.out))
    diverged = folder.path / "diverged.json"
    if folder.config_file.exists():
        before = folder.read_config()
        for name in _PROTOCOL:
            was, now = getattr(before.train, name), getattr(config.train, name)
            if was != now:
                raise ConfigError(
                    f"train.{name}: the study has a run with {was} ({folder.path}), and now it is {now}; such runs "
                    "cannot be compared: set it back, or choose another `out`"
                )
        if diverged.exists() and before == config:
            return None
    try:
        train(config, console, label=label)
    except NonFiniteError as error:
        write_json(diverged, {"message": str(error)})
        console.print(f"{label}: {error}", markup=False, highlight=False, soft_wrap=True)
        return None
    loss: float = folder.read_metrics()[-1]["val_loss"]
    return loss
