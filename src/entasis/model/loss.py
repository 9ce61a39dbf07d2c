"""Cross-entropy between hidden states and next tokens, in chunks, so that all logits are never held at once.

A vocabulary of 50,000 makes the float32 logits of a batch its largest tensor by far. The loss of a chunk of tokens and
its gradients need only that chunk's logits, so both are computed chunk by chunk in the forward pass, and nothing but
the gradients is kept. The result equals the plain loss.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

IGNORED = -100
"""Target of a position that is not counted."""
_CHUNK_LOGITS = 2**24
"""Logits held at once (64 MiB in float32)."""


def summed_cross_entropy(
    hidden: Float[Tensor, "tokens width"],
    head_weight: Float[Tensor, "vocab width"],
    targets: Int[Tensor, " tokens"],
    *,
    chunk_tokens: int | None = None,
) -> Float[Tensor, ""]:
    """Sum of the cross-entropies in nats over the counted targets, reduced in float32 (float64 for float64 inputs).

    Under autocast the products run in its dtype, as those of the model do.

    Args:
        hidden: the head's input.
        head_weight: from hidden to logits.
        targets: ids; `IGNORED` where a position does not count.
        chunk_tokens: tokens per chunk; None: as many as keep the logits at some 64 MiB.
    """
    chunk = chunk_tokens or max(1, _CHUNK_LOGITS // head_weight.shape[0])
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    summed: Tensor = _SummedCrossEntropy.apply(hidden, head_weight, targets, chunk, dtype)  # type: ignore[no-untyped-call]
    return summed


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch gives it no public type
        hidden: Tensor,
        head_weight: Tensor,
        targets: Tensor,
        chunk: int,
        dtype: torch.dtype,
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        exact = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(head_weight, dtype=exact) if needs_weight else None
        weight = head_weight.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(targets), chunk):
                states, wanted = hidden[start : start + chunk].to(dtype), targets[start : start + chunk]
                logits = functional.linear(states, weight).to(exact)
                total += functional.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
                if grad_hidden is None and grad_weight is None:
                    continue
                # d(loss)/d(logits) = softmax - one-hot on counted rows, 0 on the others.
                grad = torch.softmax(logits, dim=-1)
                counted = wanted != IGNORED
                grad[torch.arange(len(wanted), device=grad.device), wanted.clamp_min(0)] -= 1
                grad = (grad * counted.unsqueeze(-1)).to(dtype)
                if grad_hidden is not None:
                    grad_hidden[start : start + chunk] = grad @ weight
                if grad_weight is not None:
                    grad_weight += grad.T @ states
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = head_weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * grad_output.to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * grad_output).to(ctx.weight_dtype),
            None,
            None,
            None,
        )
