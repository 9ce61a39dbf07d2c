"""The MLP of one layer as a mixture of experts: a router sends each token to a few of many small MLPs.

Nothing is dropped and no expert has a capacity: every token is seen by each expert that it chose, however uneven that
is. What the router decided comes out beside the update, for the auxiliary loss that keeps the experts in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from entasis.model.grouped import grouped_linear
from entasis.model.mlp import activate
from entasis.model.norm import Norm
from entasis.model.projection import Projection
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape

Z_LOSS = 0.1
"""Share of the router's z-loss in its loss (><former)."""


class Routing(NamedTuple):
    """What the router of one layer decided about a batch."""

    logits: Float[Tensor, "tokens experts"]
    chosen: Int[Tensor, "tokens experts_per_token"]
    """The experts of each token, the most wanted first."""

    def counts(self) -> Int[Tensor, " experts"]:
        """How many tokens each expert got."""
        counts = torch.zeros(self.logits.shape[-1], dtype=torch.int64, device=self.chosen.device)
        ones = torch.ones((), dtype=torch.int64, device=self.chosen.device)
        return counts.scatter_add(0, self.chosen.flatten(), ones.expand(self.chosen.numel()))


def router_loss(routings: Sequence[Routing]) -> Float[Tensor, ""]:
    """The auxiliary loss of the routers, summed over layers: load balancing + 0.1 z-loss.

    Load balancing (Switch Transformer): experts x sum over experts of (share of the assignments, mean probability); 1
    when even. The z-loss is the mean squared log-sum-exp of the logits.
    """
    return torch.stack([_loss(routing) for routing in routings]).sum()


def _loss(routing: Routing) -> Float[Tensor, ""]:
    experts = routing.logits.shape[-1]
    share = routing.counts().to(routing.logits.dtype) / routing.chosen.numel()
    probability = torch.softmax(routing.logits, dim=-1).mean(dim=0)
    balance = experts * (share * probability).sum()
    return balance + Z_LOSS * torch.logsumexp(routing.logits, dim=-1).square().mean()


class Experts(nn.Module):
    """One projection per expert, stacked: weight (experts, out, in); bias flat, (experts x out), as vectors are."""

    def __init__(self, experts: int, in_width: int, out_width: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_width, in_width))
        self.bias = nn.Parameter(torch.empty(experts * out_width)) if bias else None

    def forward(
        self, rows: Float[Tensor, "rows in"], expert: Int[Tensor, " rows"], ends: Int[Tensor, " experts"]
    ) -> Float[Tensor, "rows out"]:
        """The projected rows, in their dtype.

        Args:
            rows: sorted by expert.
            expert: of each row.
            ends: the row at which each expert's rows end.
        """
        projected: Tensor = grouped_linear(rows, self.weight.to(rows.dtype), ends)
        if self.bias is None:
            return projected
        return projected + functional.embedding(expert, self.bias.view(len(ends), -1)).to(rows.dtype)


class MoE(nn.Module):
    """The update that a mixture of experts adds to the stream.

    The router's logits are taken from the normalised state. A token goes to the experts of its `experts_per_token`
    largest logits, and their updates are summed, weighted with the softmax over those few. An expert is an MLP like
    that of `entasis.model.mlp`; there is no shared one.
    """

    def __init__(self, layer: LayerShape, config: ModelConfig) -> None:
        super().__init__()
        self.experts_per_token = layer.experts_per_token
        self.gated = config.activation == "swiglu"
        hidden = config.mlp_input_matrices * layer.mlp_hidden
        self.norm = Norm(layer.width, config)
        self.router = Projection(layer.width, layer.experts, bias=False)
        self.input = Experts(layer.experts, layer.width, hidden, bias=config.bias)
        self.output = Experts(layer.experts, layer.mlp_hidden, layer.width, bias=config.bias)

    def forward(self, x: Float[Tensor, "batch time width"]) -> tuple[Float[Tensor, "batch time width"], Routing]:
        """The update to `x`, the layer's prefix of the stream, and what the router decided."""
        tokens = self.norm(x).flatten(0, -2)
        routing, weights = self._route(tokens)
        chosen = routing.chosen.flatten()
        order = chosen.argsort(stable=True)
        expert = chosen[order]
        number = torch.arange(routing.logits.shape[-1], device=expert.device)
        ends = torch.searchsorted(expert, number, right=True).to(torch.int32)

        # Autocast does not know grouped products, so its dtype is chosen here. Tokens are copied once per choice and
        # then permuted, so that no gradient is a sum in an order left to chance.
        device = x.device.type
        if torch.is_autocast_enabled(device):
            tokens = tokens.to(torch.get_autocast_dtype(device))
        rows = tokens.repeat_interleave(self.experts_per_token, dim=0)[order]
        rows = self.output(activate(self.input(rows, expert, ends), gated=self.gated), expert, ends)
        updates = rows[order.argsort()].unflatten(0, (-1, self.experts_per_token))
        return (updates * weights.unsqueeze(-1)).sum(dim=1).view(x.shape).to(x.dtype), routing

    def _route(
        self, tokens: Float[Tensor, "tokens width"]
    ) -> tuple[Routing, Float[Tensor, "tokens experts_per_token"]]:
        """Decided at least in float32: rounded logits would tie and send tokens elsewhere."""
        with torch.autocast(tokens.device.type, enabled=False):
            exact = torch.promote_types(self.router.weight.dtype, torch.float32)
            logits = functional.linear(tokens.to(exact), self.router.weight.to(exact))
            top = logits.topk(self.experts_per_token, dim=-1)
            return Routing(logits, top.indices), torch.softmax(top.values, dim=-1)
