"""The MLP of one layer: gated (SwiGLU) or plain (GELU with the tanh approximation)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from entasis.model.norm import Norm
from entasis.model.projection import Projection
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape


class MLP(nn.Module):
    """The update that the MLP adds to the stream.

    SwiGLU: output(silu(gate) * up), where one fused `input` weight gives both; its first `mlp_hidden` rows are the
    gate, the rest up. GELU: output(gelu(input(x))).
    """

    def __init__(self, layer: LayerShape, config: ModelConfig) -> None:
        super().__init__()
        self.gated = config.activation == "swiglu"
        self.norm = Norm(layer.width, config)
        self.input = Projection(layer.width, config.mlp_input_matrices * layer.mlp_hidden, bias=config.bias)
        self.output = Projection(layer.mlp_hidden, layer.width, bias=config.bias)

    def forward(self, x: Float[Tensor, "batch time width"]) -> Float[Tensor, "batch time width"]:
        """The update to `x`, the layer's prefix of the stream."""
        update: Tensor = self.output(activate(self.input(self.norm(x)), gated=self.gated))
        return update


def activate(hidden: Float[Tensor, "*batch units"], *, gated: bool) -> Float[Tensor, "*batch hidden"]:
    """Hidden units from the input projection: silu(first half) * second half when gated, else gelu."""
    if not gated:
        return functional.gelu(hidden, approximate="tanh")
    gate, up = hidden.chunk(2, dim=-1)
    return functional.silu(gate) * up
