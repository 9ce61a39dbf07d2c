"""The optimizer: AdamW, with weight decay on matrices only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from entasis.errors import EntasisError
from entasis.run.config import OptimizerSection


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that are treated alike."""

    name: str
    parameters: tuple[str, ...]
    count: int
    """Numbers in them."""
    weight_decay: float


class Optimizer:
    """AdamW over a model's named parameters; its state goes in and out by parameter name.

    Two groups: matrices (embeddings, projections, the head) decay; vectors (norm weights, biases) do not.
    """

    def __init__(self, model: nn.Module, section: OptimizerSection) -> None:
        named = dict(model.named_parameters())
        matrices = {name: parameter for name, parameter in named.items() if parameter.ndim >= 2}
        vectors = {name: parameter for name, parameter in named.items() if parameter.ndim < 2}
        parts = [("matrices", matrices, section.weight_decay), ("vectors", vectors, 0.0)]
        self.groups = tuple(
            Group(name, tuple(part), sum(parameter.numel() for parameter in part.values()), decay)
            for name, part, decay in parts
        )
        self._names = {parameter: name for name, parameter in named.items()}
        self._adamw = torch.optim.AdamW(
            [{"params": list(part.values()), "weight_decay": decay} for _, part, decay in parts if part],
            lr=section.learning_rate,
            betas=(section.betas[0], section.betas[1]),
            eps=section.epsilon,
            fused=True,  # one kernel for all parameters; five times the speed of the default on a CPU
        )

    def describe(self) -> str:
        """The groups in one line."""
        parts = [
            f"{group.weight_decay:g} on {len(group.parameters)} {group.name} ({group.count:,} numbers)"
            for group in self.groups
        ]
        return f"AdamW, weight decay {', '.join(parts)}"

    def step(self, learning_rate: float) -> None:
        """One update at `learning_rate`; gradients are dropped after it."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """What the optimizer carries from step to step, as `parameter.name:quantity`."""
        return {
            f"{name}:{quantity}": value
            for parameter, name in self._names.items()
            for quantity, value in self._adamw.state[parameter].items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what `state` gave.

        Raises:
            EntasisError: a quantity is missing, left over, or of another size or dtype.
        """
        left = dict(state)
        for parameter, name in self._names.items():
            quantities = {}
            for quantity in ("step", "exp_avg", "exp_avg_sq"):
                value = left.pop(f"{name}:{quantity}", None)
                expected = torch.Size([]) if quantity == "step" else parameter.shape
                if value is None or value.shape != expected or value.dtype != torch.float32:
                    raise EntasisError(
                        f"optimizer state {name}:{quantity}: expected float32 of shape {tuple(expected)}"
                    )
                quantities[quantity] = value.to(parameter.device).clone()
            self._adamw.state[parameter] = quantities
        if left:
            raise EntasisError(f"optimizer state {next(iter(left))}: no such parameter in this model")
