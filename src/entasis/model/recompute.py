"""Activation checkpointing: what the backward pass needs of a block is computed again instead of kept.

`block` keeps each block's input alone and runs the whole block once more when its gradient is due: the least memory,
for one more forward pass. `selective` keeps the outputs of the matrix products and of attention too, in which nearly
all of the time goes, and computes again what lies between them: norms, rotations, activations, sums. The numbers are
the same either way, since the same operations run on the same inputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from entasis.model import grouped  # noqa: F401 - defines torch.ops.entasis
from entasis.model.transformer import Transformer

Recomputation = Literal["none", "block", "selective"]

_KEPT_BY_SELECTIVE = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.entasis.grouped_linear.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""Attention that no fused kernel takes is made of batched products (bmm), which are left out: they are as large as all
pairs of tokens."""


def recompute_activations(model: Transformer, how: Recomputation) -> None:
    """From now on, passes through `model` that record gradients keep activations as `how` says.

    Nothing else changes: weights and their names, what a forward pass gives, passes without gradients. Call it once,
    and before the model is compiled.
    """
    if how == "none":
        return
    # Nothing in a block is random.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if how == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _KEPT_BY_SELECTIVE)
    for _, block in model.blocks():
        block.forward = partial(checkpoint, block.forward, **options)  # type: ignore[method-assign]
