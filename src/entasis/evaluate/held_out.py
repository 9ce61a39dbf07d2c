"""Loss on the held-out split: the same windows each time, no random state read or changed."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from entasis.data.stream import Batch
from entasis.errors import EntasisError
from entasis.model.device import Computation
from entasis.model.loss import summed_cross_entropy
from entasis.model.transformer import Transformer


@torch.no_grad()
def held_out_loss(model: Transformer, batches: Iterable[Batch], computation: Computation) -> float:
    """Mean cross-entropy in nats per counted token over `batches`."""
    total, counted = 0.0, 0
    for batch in batches:
        documents = None if batch.documents is None else computation.tensor(batch.documents)
        with computation.autocast():
            hidden = model.hidden(computation.tensor(batch.tokens), documents)
            targets = computation.tensor(batch.targets)
            total += summed_cross_entropy(hidden.flatten(0, 1), model.head_weight, targets.flatten()).item()
        counted += batch.counted
    if not counted:
        raise EntasisError(
            "no held-out target counts: the windows hold nothing but end tokens (an encoder is not asked for them) or "
            "documents of one token (with document_mask); evaluate on more text"
        )
    return total / counted


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """A loss in nats per token as bits per byte of text, comparable across tokenizers."""
    return loss / math.log(2) / bytes_per_token
