"""Loss on the held-out split: the same windows each time, no random state read or changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from entasis.data.stream import Batch
from entasis.errors import EntasisError
from entasis.model.device import Computation
from entasis.model.language_loss import LanguageLoss
from entasis.model.transformer import Transformer


@torch.no_grad()
def held_out_loss(
    model: Transformer | LanguageLoss,
    batches: Iterable[Batch],
    computation: Computation,
    *,
    rank: int = 0,
    ranks: int = 1,
    add: Callable[[Tensor], Tensor] = lambda totals: totals,
) -> float:
    """Mean cross-entropy in nats per counted token over `batches`, which `ranks` processes share.

    Every rank passes as many batches through the model (where they cannot be shared evenly, one to no effect), since
    the ranks of a cut model pass through it together. The sums of the batches are added in their order, so that the
    result has the same bits however many ranks there are.

    Args:
        model: the model, or the model with its loss as ranks hold it.
        batches: all of them, on every rank.
        computation: the device and dtype.
        rank: this process's number, whose batches are every `ranks`-th.
        ranks: how many processes share the batches.
        add: adds a tensor up over the processes.
    """
    loss = model if isinstance(model, LanguageLoss) else LanguageLoss(model)
    own: dict[int, float] = {}
    count, counted = 0, 0

    def total(batch: Batch) -> float:
        documents = None if batch.documents is None else computation.tensor(batch.documents)
        with computation.autocast():
            summed, _ = loss(computation.tensor(batch.tokens), computation.tensor(batch.targets), documents)
        return float(summed)

    for batch in batches:
        if count % ranks == rank:
            own[count] = total(batch)
        count += 1
        counted += batch.counted
    if 0 < count % ranks <= rank:
        total(batch)
    totals = torch.zeros(count, dtype=torch.float64)
    totals[list(own)] = torch.tensor(list(own.values()), dtype=torch.float64)
    if not counted:
        raise EntasisError(
            "no held-out target counts: the windows hold nothing but end tokens (an encoder is not asked for them) or "
            "documents of one token (with document_mask); evaluate on more text"
        )
    return float(sum(add(totals).tolist())) / counted


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """A loss in nats per token as bits per byte of text, comparable across tokenizers."""
    return loss / math.log(2) / bytes_per_token
