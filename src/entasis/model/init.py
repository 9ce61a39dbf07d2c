"""How a model starts: which distribution each weight is drawn from, and in which order.

Everything is drawn in float32 on the CPU from one generator, tensor by tensor in the fixed order of `initialize`. So
the start depends on the seed and on the tensors' shapes alone, not on device or dtype, and two shapes whose tensors are
alike (a prism and its uniform reference) start with the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from entasis.model.moe import MoE
from entasis.model.projection import Projection
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape

if TYPE_CHECKING:
    from entasis.model.transformer import Transformer

STD = 0.02
"""Standard deviation of tables, and of matrices into a layer of width `STD_WIDTH`: GPT-2's."""
STD_WIDTH = 768
"""Width of the model that GPT-2's 0.02 was chosen for."""


MUP_STD = 0.1
"""The published ><former recipe's: of tables, and of matrices before they are divided by its square root of 8."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviations of the weights of one model."""

    shape: Shape
    config: ModelConfig

    @property
    def table(self) -> float:
        """Of embedding, learned positions and head."""
        return MUP_STD if self.config.initialisation == "mup" else STD

    def into(self, width: int) -> float:
        """Of a matrix that reads a state of `width` coordinates: queries, keys, values, hidden units, a router."""
        if self.config.initialisation == "mup":
            return MUP_STD / math.sqrt(self.config.logit_divisor) * math.sqrt(self.shape.embed_width / width)
        return matrix_std(width)

    def back(self, layer: LayerShape) -> float:
        """Of a matrix whose output is added to the stream: the updates of all layers, two each, sum to the variance of
        one unscaled. `layer` is the shape's, whose width is the fan-in even where the stream's is constant."""
        return self.into(layer.width) / math.sqrt(2 * len(self.shape.layers))


def matrix_std(width: int) -> float:
    """Standard deviation of a matrix that reads a layer of `width` coordinates: its outputs have the same variance at
    every width, since the layer's norm gives each coordinate a mean square of one."""
    return STD * math.sqrt(STD_WIDTH / width)


@torch.no_grad()
def initialize(model: Transformer, seed: int) -> None:
    """Gives every parameter of `model` its first value. Parameters on the meta device are left alone."""
    generator = torch.Generator(device="cpu").manual_seed(seed)

    def draw(weight: Tensor, std: float) -> None:
        if not weight.is_meta:
            weight.copy_(_empty(weight).normal_(0, std, generator=generator))

    def draw_evenly(weight: Tensor, bound: float) -> None:
        if not weight.is_meta:
            weight.copy_(_empty(weight).uniform_(-bound, bound, generator=generator))

    spread = Spread(model.shape, model.config)
    draw(model.embed.weight, spread.table)
    if model.positions is not None:
        draw(model.positions.weight, spread.table)
    for layer, (built, block) in zip(model.shape.layers, model.blocks(), strict=True):
        into, back = spread.into(built.width), spread.back(layer)
        if block.attention is not None:
            draw(block.attention.qkv.weight, into)
            draw(block.attention.out.weight, back)
        if block.mlp is not None:
            if isinstance(block.mlp, MoE):
                draw(block.mlp.router.weight, into)
            draw(block.mlp.input.weight, into)
            draw(block.mlp.output.weight, back)
    if model.head is not None:
        draw(model.head.weight, spread.table)
    for resize in model.resizes.modules() if model.resizes is not None else ():
        if isinstance(resize, Projection):
            # The published ablation left these at torch's default, which is uniform. They come last, so that a start
            # shares every other number with that of the same shape on a carried stream.
            bound = resize.in_width**-0.5
            draw_evenly(resize.weight, bound)
    for module in model.modules():
        _set_vectors(module)


def _empty(weight: Tensor) -> Tensor:
    return torch.empty(weight.shape, dtype=torch.float32, device="cpu")


def _set_vectors(module: nn.Module) -> None:
    """Norm weights start at one; biases and gates (a half, through the sigmoid) at zero."""
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim == 1:
            parameter.fill_(1.0 if name == "weight" else 0.0)
