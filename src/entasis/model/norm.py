"""Normalisation over the coordinates of one layer: RMSNorm or LayerNorm, as the configuration says."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from entasis.shape.model_config import ModelConfig


class Norm(nn.Module):
    """Normalises the last dimension, over all `width` coordinates (zeros included), and scales by a learned weight.

    RMSNorm divides by the root mean square. LayerNorm subtracts the mean first and, where the configuration has biases,
    adds a learned one.
    """

    def __init__(self, width: int, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.norm
        self.epsilon = config.norm_epsilon
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if config.norm_has_bias else None

    def forward(self, x: Float[Tensor, "batch time width"]) -> Float[Tensor, "batch time width"]:
        """The normalised state."""
        # A cut model may gather its weights in bfloat16 while the stream is float32.
        weight, bias = self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        width = tuple(weight.shape)
        if self.kind == "rmsnorm":
            return functional.rms_norm(x, width, weight, self.epsilon)
        return functional.layer_norm(x, width, weight, bias, self.epsilon)
