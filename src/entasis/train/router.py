"""The routers of a mixture of experts over one step: their auxiliary loss, and how the experts were used."""

from __future__ import annotations

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
        tokens: of the step. The loss of a pass counts by the share of them that it reads.
    """

    def __init__(self, shape: Shape, weight: float, tokens: int) -> None:
        self.layers = tuple(number for number, layer in enumerate(shape.layers, start=1) if layer.experts)
        """Those that have a router, counted from 1."""
        self._weight = weight
        self._tokens = tokens
        self._routings: list[Routing] = []
        self._losses: list[Tensor] = []
        """Of the passes so far, each with its share of the step."""
        self._counts: list[list[Tensor]] = []
        """Of the passes so far: tokens of each expert, layer by layer."""

    def listen(self) -> tuple[list[Routing], ...]:
        """A pass begins; what it gives to `Transformer.hidden` after the documents."""
        self._routings = []
        return (self._routings,) if self.layers else ()

    def added_to(self, loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """The pass's loss with that of its routers; `loss` itself without experts."""
        if not self._routings:
            return loss
        loss_of_pass = router_loss(self._routings) * (len(self._routings[0].logits) / self._tokens)
        self._losses.append(loss_of_pass.detach())
        self._counts.append([routing.counts() for routing in self._routings])
        return loss + self._weight * loss_of_pass

    def record(self, *, load: bool) -> dict[str, Any]:
        """Fields for the step's metrics: `router_loss`, not weighted, and `expert_load` where `load` asks for it."""
        if not self.layers:
            return {}
        fields: dict[str, Any] = {"router_loss": torch.stack(self._losses).sum().item()}
        if load:
            fields["expert_load"] = {
                str(number): [round(share, 4) for share in _shares(passes)]
                for number, passes in zip(self.layers, zip(*self._counts, strict=True), strict=True)
            }
        return fields


def _shares(passes: tuple[Tensor, ...]) -> list[float]:
    """Of all assignments of one layer, the share of each expert."""
    counts = torch.stack(passes).sum(dim=0)
    shares: list[float] = (counts / counts.sum()).tolist()
    return shares
