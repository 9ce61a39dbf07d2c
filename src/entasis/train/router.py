"""The routers of a mixture of experts over one step: their auxiliary loss, and how the experts were used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from entasis.model.moe import Routing, router_loss
from entasis.shape.records import Shape


class RouterStep:
    """What the routers of a model do in one optimizer step. Of a model without experts: nothing, at no cost.

    Args:
        shape: of the model.
        weight: of the routers' loss in what is trained.
        tokens: of the step, over all ranks. The loss of a pass counts by the share of them that it reads.

    The load is balanced within each pass. So the routers' loss depends on `train.micro_batch`, and not on which rank
    makes which pass.
    """

    def __init__(self, shape: Shape, weight: float, tokens: int) -> None:
        self.layers = tuple(number for number, layer in enumerate(shape.layers, start=1) if layer.experts)
        """Those that have a router, counted from 1."""
        self._weight = weight
        self._tokens = tokens
        self._losses: list[Tensor] = []
        """Of the passes so far, each with its share of the step."""
        self._counts: list[list[Tensor]] = []
        """Of the passes so far: tokens of each expert, layer by layer."""

    def added_to(self, loss: Float[Tensor, ""], routings: Sequence[Routing]) -> Float[Tensor, ""]:
        """The loss of a pass with that of its routers, which decided so; `loss` itself without experts."""
        if not routings:
            return loss
        loss_of_pass = router_loss(routings) * (len(routings[0].logits) / self._tokens)
        self._losses.append(loss_of_pass.detach())
        self._counts.append([routing.counts() for routing in routings])
        return loss + self._weight * loss_of_pass

    def record(self, *, load: bool, summed: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> dict[str, Any]:
        """Fields for the step's metrics: `router_loss`, not weighted, and `expert_load` where `load` asks for it.

        `summed` adds a tensor up over the ranks, each of which has heard its own passes.
        """
        if not self.layers:
            return {}
        fields: dict[str, Any] = {"router_loss": summed(torch.stack(self._losses).sum()).item()}
        if load:
            fields["expert_load"] = {
                str(number): [round(share, 4) for share in _shares(summed(torch.stack(passes).sum(dim=0)))]
                for number, passes in zip(self.layers, zip(*self._counts, strict=True), strict=True)
            }
        return fields


def _shares(counts: Tensor) -> list[float]:
    """Of all assignments of one layer, the share of each expert."""
    shares: list[float] = (counts / counts.sum()).tolist()
    return shares
