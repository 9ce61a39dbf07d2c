"""Which commands are started once, and not by torchrun: those that train several models, and not one together."""

from __future__ import annotations

import os

from entasis.errors import ConfigError


def require_alone(command: str, instead: str) -> None:
    """Refuses to be one of several processes that torchrun, or a scheduler in its way, started.

    Each of them would begin the same study in the same folder.

    Raises:
        ConfigError: there are several; `instead` says what to do.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1":
        raise ConfigError(
            f"entasis {command}: WORLD_SIZE is {size} in the environment, as torchrun sets it, but this command trains "
            f"each model in one process: {instead}"
        )
