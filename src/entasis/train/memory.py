"""How much of a GPU's memory a run takes at most."""

from __future__ import annotations

import torch


def count_peak_from_here(device: torch.device) -> None:
    """Forgets what runs before took in the same process, as those of a study."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """Bytes that tensors took at most at once; None where the device does not count them."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
