"""What a run ran on: versions, device, threads. Kept beside its results, since bit equality is promised for these."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from entasis import __version__


def environment_record(device: torch.device) -> dict[str, Any]:
    """Plain data for `environment.json`."""
    return {
        "entasis": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("torch", "numpy", "safetensors", "tokenizers")},
        "platform": platform.platform(),
        "device": device.type,
        "device_name": device_name(device),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
    }


def device_name(device: torch.device) -> str:
    """The device's model, as far as the system tells."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
