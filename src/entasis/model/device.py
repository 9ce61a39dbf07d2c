"""Where and in what precision a model computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from entasis.errors import ConfigError

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Computation:
    """A device and the dtype in which matrices multiply there. Weights and reductions stay in float32."""

    device: torch.device
    dtype: torch.dtype

    def autocast(self) -> AbstractContextManager[object]:
        """The context for forward passes: bfloat16 products, or nothing in float32."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def tensor(self, array: IntArray) -> Tensor:
        """Integers on the device; to a GPU the copy does not wait."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    @property
    def precision(self) -> str:
        """fp32 or bf16."""
        return "fp32" if self.dtype == torch.float32 else "bf16"


def choose_computation(
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "auto",
    threads: int | Literal["auto"] = "auto",
) -> Computation:
    """Resolves `auto` for this machine and sets the number of CPU threads where it is given.

    Raises:
        ConfigError: the device is not there.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    name = next(kind for kind, there in available.items() if there) if device == "auto" else device
    if not available[name]:
        there = ", ".join(kind for kind, is_there in available.items() if is_there)
        raise ConfigError(f"train.device: {name} is not available here; available: {there}")
    if threads != "auto":
        torch.set_num_threads(threads)
    chosen = torch.device(name)
    if precision == "auto":
        precision = "bf16" if _computes_in_bf16(name) else "fp32"
    return Computation(chosen, torch.bfloat16 if precision == "bf16" else torch.float32)


def _computes_in_bf16(device: str) -> bool:
    """Whether bfloat16 products run in hardware; where they are emulated they are slower than float32."""
    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device == "cpu":
        capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
        return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return False
