"""A model together with its loss, as one module: what is trained, and what is spread over several devices."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor, nn

from entasis.model.loss import summed_cross_entropy
from entasis.model.moe import Routing
from entasis.model.transformer import Transformer


class LanguageLoss(nn.Module):
    """From tokens and targets to the summed loss.

    What gathers weights for a module and lets them go again has to see the head's use of them too; so the loss is
    taken inside.

    Args:
        model: the model.
        hidden: what stands in for `model.hidden`, compiled say; None: itself.
    """

    def __init__(self, model: Transformer, hidden: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.model = model
        self._hidden = hidden or model.hidden
        self._routes = any(layer.experts for layer in model.shape.layers)

    def forward(
        self,
        tokens: Int[Tensor, "batch time"],
        targets: Int[Tensor, "batch time"],
        documents: Int[Tensor, "batch time"] | None = None,
    ) -> tuple[Float[Tensor, ""], list[Routing]]:
        """The sum over counted targets in nats, and what the routers decided, layer by layer."""
        routings: list[Routing] = []
        hidden = self._hidden(tokens, documents, *((routings,) if self._routes else ()))
        return summed_cross_entropy(hidden.flatten(0, 1), self.model.head_weight, targets.flatten()), routings
