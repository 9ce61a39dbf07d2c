"""How a model starts: which distribution each weight is drawn from, and in which order.

Everything is drawn in float32 on the CPU from one generator, tensor by tensor in the fixed order of `initialize`. So
the start depends on the seed and on the tensors' shapes alone, not on device or dtype, and two shapes whose tensors are
alike (a prism and its uniform reference) start with the same bits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from entasis.model.transformer import Transformer

STD = 0.02
"""Standard deviation of tables, and of matrices into a layer of width `STD_WIDTH`: GPT-2's."""
STD_WIDTH = 768
"""Width of the model that GPT-2's 0.02 was chosen for."""


def matrix_std(width: int) -> float:
    """Standard deviation of a matrix that reads a layer of `width` coordinates: its outputs have the same variance at
    every width, since the layer's norm gives each coordinate a mean square of one."""
    return STD * math.sqrt(STD_WIDTH / width)


def residual_std(width: int, layers: int) -> float:
    """Standard deviation of a matrix whose output is added to the stream: 2 `layers` updates sum to the variance of
    one unscaled."""
    return matrix_std(width) / math.sqrt(2 * layers)


@torch.no_grad()
def initialize(model: Transformer, seed: int) -> None:
    """Gives every parameter of `model` its first value. Parameters on the meta device are left alone."""
    generator = torch.Generator(device="cpu").manual_seed(seed)

    def draw(weight: Tensor, std: float) -> None:
        if weight.is_meta:
            return
        weight.copy_(torch.empty(weight.shape, dtype=torch.float32, device="cpu").normal_(0, std, generator=generator))

    draw(model.embed.weight, STD)
    if model.positions is not None:
        draw(model.positions.weight, STD)
    for layer, block in model.blocks():
        into, back = matrix_std(layer.width), residual_std(layer.width, len(model.shape.layers))
        if block.attention is not None:
            draw(block.attention.qkv.weight, into)
            draw(block.attention.out.weight, back)
        if block.mlp is not None:
            draw(block.mlp.input.weight, into)
            draw(block.mlp.output.weight, back)
    if model.head is not None:
        draw(model.head.weight, STD)
    for module in model.modules():
        _set_vectors(module)


def _set_vectors(module: nn.Module) -> None:
    """Norm weights start at one, biases at zero."""
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim == 1:
            parameter.fill_(1.0 if name == "weight" else 0.0)
