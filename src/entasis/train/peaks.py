"""Peak arithmetic rates of devices, for model-FLOPs utilisation. An unknown device has none, not a wrong one."""

from __future__ import annotations

import re

import torch

# Dense rates in TFLOP/s as the makers state them: (bfloat16, float32). The first that the name fits counts.
_PEAKS = {
    "B200": (2250.0, 75.0),
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "H100": (989.4, 66.9),
    "H200": (989.4, 66.9),
    "H800 PCIe": (756.0, 51.0),
    "H800": (989.4, 66.9),
    "A100": (312.0, 19.5),
    "A800": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L4": (121.0, 30.3),
    "A10": (125.0, 31.2),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
}
_OTHER_DEVICES = {"MIG", "Laptop", "Max-Q", "Ti", "D", "SUPER"}
"""Words that make another device of a name: a slice of it, or a weaker or stronger sister."""


def peak_flops(device_name: str, dtype: torch.dtype, *, devices: int = 1) -> tuple[float, str] | None:
    """Peak in FLOP/s of so many devices of a name, and what to call it; None for one that is not in the table."""
    words = set(re.split(r"[ -]", device_name)) | set(device_name.split())
    if words & _OTHER_DEVICES:
        return None
    for name, (bf16, fp32) in _PEAKS.items():
        if words.issuperset(name.split()):
            tera = bf16 if dtype == torch.bfloat16 else fp32
            label = f"{name} {'bf16' if dtype == torch.bfloat16 else 'fp32'} {tera:g} TFLOP/s"
            return devices * tera * 1e12, label if devices == 1 else f"{devices} × {label}"
    return None
