"""The errors that reach a user: each is one line that says what is wrong, where, and what to do."""

from __future__ import annotations


class EntasisError(Exception):
    """Something failed; its text is one line for the user. The command line leaves with `exit_status`."""

    exit_status = 1


class ConfigError(EntasisError):
    """A setting is wrong; the line starts with the setting's dotted name."""

    exit_status = 2


class StorageError(EntasisError):
    """A disk refused to write: it is full, say. It may not refuse the next time."""


class ShapeError(EntasisError):
    """A shape cannot be built as asked; the line names the layer (counted from 1) and the numbers."""

    def __init__(self, message: str, layer: int | None = None) -> None:
        super().__init__(message if layer is None else f"layer {layer}: {message}")
        self.message = message
        """Without the layer."""
        self.layer = layer
