"""The network of a shape: embedding, blocks on the carried residual stream, final norm, head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from entasis.errors import EntasisError
from entasis.model.attention import Attention
from entasis.model.documents import document_positions
from entasis.model.init import initialize
from entasis.model.mlp import MLP
from entasis.model.moe import MoE, Routing
from entasis.model.norm import Norm
from entasis.model.projection import Embedding, Projection
from entasis.model.resize import Stream, resizes
from entasis.model.rotary import Rotation, rotation
from entasis.model.stream import ResidualStream
from entasis.model.window import Mask, attention_masks
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape
from entasis.shape.rules import require_valid
from entasis.shape.stream import as_built, qkv_input_widths


class Block(nn.Module):
    """One layer: attention, then MLP, each adding its update to the layer's prefix of the stream."""

    def __init__(self, layer: LayerShape, qkv_input: int, config: ModelConfig) -> None:
        super().__init__()
        self.residual_multiplier = config.residual_multiplier
        self.attention = Attention(layer, qkv_input, config) if layer.has_attention else None
        self.mlp = (MoE(layer, config) if layer.experts else MLP(layer, config)) if layer.has_mlp else None

    def forward(
        self,
        x: Float[Tensor, "batch time width"],
        rotation: Rotation | None,
        mask: Mask,
    ) -> tuple[Float[Tensor, "batch time width"], Routing | None]:
        """The prefix after this layer, and what its router decided, if it has one."""
        routing = None
        if self.attention is not None:
            # One operation; at a multiplier of 1 it is the plain sum.
            x = torch.add(x, self.attention(x, rotation, mask), alpha=self.residual_multiplier)
        if self.mlp is not None:
            update = self.mlp(x)
            if isinstance(self.mlp, MoE):
                update, routing = update
            x = torch.add(x, update, alpha=self.residual_multiplier)
        return x, routing


class Transformer(nn.Module):
    """A language model (or, not causal, an encoder) built from a shape, layer by layer.

    Args:
        shape: the layers and the widths at which tokens enter and leave.
        config: what a block is made of.
        seed: of the initialisation (`entasis.model.init`). The global random state is neither read nor changed.

    Raises:
        ShapeError: a rule finds an error in the shape; the line names layer and numbers.
    """

    def __init__(self, shape: Shape, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        require_valid(shape, config)
        self.shape = shape
        self.config = config
        built = as_built(shape, config)
        self.built_layers = built.layers
        self.embed = Embedding(config.vocab_size, shape.embed_width)
        self.positions = Embedding(config.context, shape.embed_width) if config.positions == "learned" else None
        self.layers = nn.ModuleList(
            Block(layer, qkv_input, config)
            for layer, qkv_input in zip(self.built_layers, qkv_input_widths(shape, config), strict=True)
        )
        self.norm = Norm(self.built_layers[-1].width, config)
        self.head = None if config.tied else Projection(shape.head_width, config.vocab_size, bias=False)
        self.resizes = resizes(built, config)
        initialize(self, seed)

    def blocks(self) -> Iterator[tuple[LayerShape, Block]]:
        """The layers in order: what each is (its width that of the stream), and the module built from it."""
        return zip(self.built_layers, cast(Iterable[Block], self.layers), strict=True)

    @property
    def parameter_count(self) -> int:
        """Numbers that are stored; equal to the counted `Budget.parameters`."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def head_weight(self) -> Float[Tensor, "vocab unembed"]:
        """The matrix from `hidden` to logits; the embedding's own when tied."""
        return self.embed.weight if self.head is None else self.head.weight

    def forward(
        self, tokens: Int[Tensor, "batch time"], documents: Int[Tensor, "batch time"] | None = None
    ) -> Float[Tensor, "batch time vocab"]:
        """Logits of the next token at every position; arguments as for `hidden`."""
        return functional.linear(self.hidden(tokens, documents), self.head_weight)

    def hidden(
        self,
        tokens: Int[Tensor, "batch time"],
        documents: Int[Tensor, "batch time"] | None = None,
        routings: list[Routing] | None = None,
    ) -> Float[Tensor, "batch time unembed"]:
        """The head's input at every position: times `head_weight` it is the logits.

        Args:
            tokens: ids, (batch, time).
            documents: the number of the document that each token belongs to. Attention stays inside a document and
                positions restart at its beginning. None: a window is one text.
            routings: a list that takes what the routers decided, layer by layer (`entasis.model.moe`).

        Raises:
            EntasisError: the sequence is longer than the learned positions.
        """
        time = tokens.shape[1]
        if self.positions is not None and time > self.config.context:
            raise EntasisError(
                f"a sequence of {time} tokens does not fit the {self.config.context} learned positions (context); "
                "shorten it, or train with a longer context or rotary positions"
            )
        if documents is None:
            positions = torch.arange(time, device=tokens.device).unsqueeze(0)
        else:
            positions = document_positions(documents)
        windows = (layer.window for layer in self.built_layers if layer.has_attention)
        masks = attention_masks(windows, time, documents, causal=self.config.causal, device=tokens.device)

        state = self.embed(tokens)
        if self.positions is not None:
            state = state + self.positions(positions)
        if self.config.embedding_multiplier != 1.0:
            state = state * self.config.embedding_multiplier
        rotations = self._rotations(positions)
        stream: Stream = ResidualStream(state) if self.resizes is None else self.resizes.stream(state)
        for layer, block in self.blocks():
            stream = stream.resized(layer.width)
            prefix, routing = block(stream.prefix, rotations.get(layer.head_dim), masks.get(layer.window))
            stream = stream.updated(prefix)
            if routings is not None and routing is not None:
                routings.append(routing)
        # The final norm spans the last layer's width: what the head does not read still counts in its mean square, and
        # what the head reads beyond it comes from the stream as it is.
        hidden = stream.updated(self.norm(stream.prefix)).resized(self.shape.head_width).prefix
        return hidden if self.config.logit_divisor == 1.0 else hidden / self.config.logit_divisor

    def _rotations(self, positions: Int[Tensor, "#batch time"]) -> Mapping[int, Rotation]:
        """The rotation of each head dim among the layers; empty without rotary positions."""
        if self.config.positions != "rotary":
            return {}
        head_dims = dict.fromkeys(layer.head_dim for layer in self.shape.layers if layer.has_attention)
        dtype = self.embed.weight.dtype
        theta, scaling = self.config.rotary_theta, self.config.rotary_scaling
        return {dim: rotation(positions, dim, theta, dtype, scaling) for dim in head_dims}
