"""Products of rows that are sorted into groups with one stored matrix per group: the experts of a mixture.

Two operations that torch sees as a whole: the compiler makes no graph of the loop over groups, whose lengths are known
only when it runs, and the FLOP counter is told what they cost. On CUDA in bfloat16 they are one grouped kernel;
elsewhere, and for sizes that the kernel refuses, one product per group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

_KERNEL_BYTES = 16
"""The kernel wants every row to begin at a multiple of this."""
_KERNEL_CAPABILITY = (8, 0)


# Schemas are written out, since torch cannot infer them from annotations with shapes.
@torch.library.custom_op(
    "entasis::grouped_linear", mutates_args=(), schema="(Tensor rows, Tensor weights, Tensor ends) -> Tensor"
)
def grouped_linear(
    rows: Float[Tensor, "rows in"], weights: Float[Tensor, "groups out in"], ends: Int[Tensor, " groups"]
) -> Float[Tensor, "rows out"]:
    """Each row times the transposed matrix of its group.

    Args:
        rows: sorted by group, contiguous.
        weights: one matrix per group, in the rows' dtype.
        ends: the row at which each group ends (int32, on the rows' device). Groups may be empty.
    """
    if _has_kernel(rows, weights):
        return functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    product = rows.new_empty(rows.shape[0], weights.shape[1])
    for group, start, end in _groups(ends):
        torch.mm(rows[start:end], weights[group].T, out=product[start:end])
    return product


@torch.library.custom_op(
    "entasis::grouped_outer", mutates_args=(), schema="(Tensor left, Tensor right, Tensor ends) -> Tensor"
)
def grouped_outer(
    left: Float[Tensor, "rows out"], right: Float[Tensor, "rows in"], ends: Int[Tensor, " groups"]
) -> Float[Tensor, "groups out in"]:
    """For each group the sum over its rows of the outer products of `left` and `right`; zero if it is empty."""
    if _has_kernel(left, right):
        return functional.grouped_mm(left.T, right, offs=ends)
    product = left.new_zeros(ends.shape[0], left.shape[1], right.shape[1])
    for group, start, end in _groups(ends):
        torch.mm(left[start:end].T, right[start:end], out=product[group])
    return product


def _groups(ends: Tensor) -> Iterator[tuple[int, int, int]]:
    """(group, its first row, the row after its last) of each group that has rows."""
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            yield group, start, end
        start = end


def _has_kernel(rows: Tensor, other: Tensor) -> bool:
    return (
        hasattr(functional, "grouped_mm")
        and rows.is_cuda
        and rows.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(rows.device) >= _KERNEL_CAPABILITY
        and all(size * rows.element_size() % _KERNEL_BYTES == 0 for size in (rows.shape[1], *other.shape[1:]))
    )


@grouped_linear.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


@grouped_outer.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:  # noqa: ANN401 - torch's own
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # noqa: ANN401 - torch's own
    rows, weights, ends = ctx.saved_tensors
    grad = grad.contiguous()
    needs_rows, needs_weights, _ = ctx.needs_input_grad
    return (
        grouped_linear(grad, weights.transpose(1, 2), ends) if needs_rows else None,
        grouped_outer(grad, rows, ends) if needs_weights else None,
        None,
    )


grouped_linear.register_autograd(_gradients, setup_context=_save)


@register_flop_formula(torch.ops.entasis.grouped_linear)
def _linear_flops(rows: tuple[int, ...], weights: tuple[int, ...], *_: object, **__: object) -> int:
    """A multiply and an add are two; however the rows are spread over the groups."""
    return 2 * rows[0] * weights[1] * weights[2]


@register_flop_formula(torch.ops.entasis.grouped_outer)
def _outer_flops(left: tuple[int, ...], right: tuple[int, ...], *_: object, **__: object) -> int:
    return 2 * left[0] * left[1] * right[1]
