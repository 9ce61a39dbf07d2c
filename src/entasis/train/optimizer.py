"""The optimizer: AdamW for everything, or Muon for the blocks' matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from entasis.errors import EntasisError
from entasis.model.transformer import Transformer
from entasis.run.parts import own_part
from entasis.run.sections import OptimizerSection

_ADAMW_QUANTITIES = ("step", "exp_avg", "exp_avg_sq")
_MUON_QUANTITIES = ("momentum_buffer",)
_ROUTER = ".router.weight"


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that are treated alike."""

    name: str
    parameters: tuple[str, ...]
    count: int
    """Numbers in them."""
    weight_decay: float
    rate: float
    """Learning rate / the run's."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """What an optimizer steps on: a parameter, or one matrix of a fused parameter as a view of it."""

    name: str
    tensor: nn.Parameter
    source: nn.Parameter
    index: tuple[int | slice, ...] | None
    """Where in `source` the piece lies; None: it is the source."""

    def take_gradient(self) -> None:
        """Lets a view see its part of the gradient."""
        if self.index is not None and self.source.grad is not None:
            self.tensor.grad = self.source.grad[self.index]


class Optimizer:
    """Optimizes a model's named parameters; its state goes in and out by name.

    Three groups: `blocks`, the matrices inside layers; `tables`, embedding, learned positions, head and the matrices
    of learned resizes; `vectors`, norm weights and biases, which do not decay. The blocks' rate is `block_rate` times
    the run's. Muon orthogonalises one matrix at a time: the query, key and value rows of a fused projection, gate and
    up, and each expert are separate. Beside Muon, the routers of experts are a fourth group, under AdamW with the
    blocks' rate: a router is a small head, one row of scores per expert. What an expert's row should be is decided by
    how often it is chosen, and orthogonalising would move the row of a rarely chosen one as much as any other.
    """

    def __init__(self, model: Transformer, section: OptimizerSection) -> None:
        named = dict(model.named_parameters())
        muon = section.name == "muon"
        parts: dict[str, dict[str, nn.Parameter]] = {"blocks": {}, "tables": {}, "vectors": {}}
        for name, parameter in named.items():
            kind = "vectors" if parameter.ndim < 2 else "blocks" if name.startswith("layers.") else "tables"
            if muon and name.endswith(_ROUTER):
                kind = "routers"
            parts.setdefault(kind, {})[name] = parameter
        self.groups = tuple(
            Group(
                name,
                tuple(part),
                sum(parameter.numel() for parameter in part.values()),
                0.0 if name == "vectors" else section.weight_decay,
                section.block_rate if name in {"blocks", "routers"} else 1.0,
            )
            for name, part in parts.items()
        )
        self._section = section
        self._parameters = list(named.values())
        self._pieces: dict[str, list[_Piece]] = {}
        for group in self.groups:
            split = muon and group.name == "blocks"
            self._pieces[group.name] = [
                piece
                for name in group.parameters
                for piece in (_matrices(model, name, named[name]) if split else [_whole(name, named[name])])
            ]
        self._optimizers = [
            self._make(by_muon, [group for group in self.groups if (group.name == "blocks") == by_muon])
            for by_muon in ((True, False) if muon else ())
        ] or [self._make(False, list(self.groups))]

    def describe(self) -> str:
        """The groups in one line."""
        parts = [
            f"{group.weight_decay:g} on {len(group.parameters)} {group.name} ({group.count:,} numbers"
            + ("" if group.rate == 1 else f", rate × {group.rate:g}")
            + ")"
            for group in self.groups
        ]
        name = "Muon for blocks and AdamW" if self._section.name == "muon" else "AdamW"
        return f"{name}, weight decay {', '.join(parts)}"

    def step(self, learning_rate: float) -> None:
        """One update at `learning_rate`; gradients are dropped after it."""
        for pieces in self._pieces.values():
            for piece in pieces:
                piece.take_gradient()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * group["rate"]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for parameter in self._parameters:
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """What is carried from step to step, as `name:quantity`."""
        return {
            f"{piece.name}:{quantity}": value
            for optimizer, piece, _ in self._stepped()
            for quantity, value in optimizer.state[piece.tensor].items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what `state` gave.

        Raises:
            EntasisError: a quantity is missing, left over, or of another size or dtype.
        """
        left = dict(state)
        for optimizer, piece, quantities in self._stepped():
            loaded = {}
            for quantity in quantities:
                value = left.pop(f"{piece.name}:{quantity}", None)
                expected = torch.Size([]) if quantity == "step" else piece.tensor.shape
                if value is None or value.shape != expected or value.dtype != torch.float32:
                    raise EntasisError(
                        f"optimizer state {piece.name}:{quantity}: expected float32 of shape {tuple(expected)}"
                    )
                place = torch.empty((), device=piece.tensor.device) if quantity == "step" else piece.tensor
                loaded[quantity] = own_part(value, place).clone()
            optimizer.state[piece.tensor] = loaded
        if left:
            raise EntasisError(f"optimizer state {next(iter(left))}: no such parameter in this model")

    def _make(self, muon: bool, groups: list[Group]) -> torch.optim.Optimizer:
        parameters = [
            {
                "params": [piece.tensor for piece in self._pieces[group.name]],
                "weight_decay": group.weight_decay,
                "rate": group.rate,
            }
            for group in groups
            if group.parameters
        ]
        if muon:
            # Updates as large as AdamW's, so that one rate suits both.
            return torch.optim.Muon(
                parameters, lr=self._section.learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
            )
        return torch.optim.AdamW(
            parameters,
            lr=self._section.learning_rate,
            betas=(self._section.betas[0], self._section.betas[1]),
            eps=self._section.epsilon,
            fused=True,  # one kernel for all parameters; five times the speed of the default on a CPU
        )

    def _stepped(self) -> Iterator[tuple[torch.optim.Optimizer, _Piece, tuple[str, ...]]]:
        """Each piece with the optimizer that steps on it and the quantities that it keeps."""
        for optimizer in self._optimizers:
            quantities = _MUON_QUANTITIES if isinstance(optimizer, torch.optim.Muon) else _ADAMW_QUANTITIES
            held = {tensor for group in optimizer.param_groups for tensor in group["params"]}
            for pieces in self._pieces.values():
                for piece in pieces:
                    if piece.tensor in held:
                        yield optimizer, piece, quantities


def _whole(name: str, parameter: nn.Parameter) -> _Piece:
    return _Piece(name, parameter, parameter, None)


def _matrices(model: Transformer, name: str, parameter: nn.Parameter) -> Iterator[_Piece]:
    """The separate matrices of a block's parameter, as views."""
    layer = model.shape.layers[int(name.split(".")[1])]
    rows = parameter.shape[-2]
    if name.endswith("attention.qkv.weight"):
        sizes = [layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim, layer.kv_heads * layer.value_head_dim]
    elif rows == model.config.mlp_input_matrices * layer.mlp_hidden and "mlp.input" in name:
        sizes = [layer.mlp_hidden] * model.config.mlp_input_matrices
    else:
        sizes = [rows]
    experts: list[tuple[int, ...]] = [(e,) for e in range(parameter.shape[0])] if parameter.ndim == 3 else [()]
    for expert in experts:
        start = 0
        for size in sizes:
            index: tuple[int | slice, ...] = (*expert, slice(start, start + size))
            view = nn.Parameter(parameter.data[index])
            label = ".".join(str(part) for part in (*expert, f"{start}-{start + size}"))
            yield _Piece(f"{name}[{label}]", view, parameter, index)
            start += size
