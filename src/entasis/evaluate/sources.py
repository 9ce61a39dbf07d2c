"""Held-out loss of a run's data: of one source, or of each source of a mixture and their mean by weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from entasis.data.dataset import TokenSource
from entasis.data.stream import held_out_batches
from entasis.evaluate.held_out import held_out_loss
from entasis.model.device import Computation
from entasis.model.language_loss import LanguageLoss
from entasis.model.transformer import Transformer
from entasis.run.config import RunConfig
from entasis.run.objective import masking


def held_out_losses(
    model: Transformer | LanguageLoss,
    config: RunConfig,
    data: TokenSource,
    computation: Computation,
    *,
    rank: int = 0,
    ranks: int = 1,
    add: Callable[[Tensor], Tensor] = lambda totals: totals,
) -> dict[str, Any]:
    """`val_loss`, and of a mixture also `source_val_losses` by name.

    A mixture's loss is the mean of its sources' losses by weight: what the model loses on text that is mixed as in
    training. Each source is asked for its share of `train.evaluate_tokens`, at least one window. `rank`, `ranks` and
    `add` are those of `held_out_loss`.
    """
    losses = {
        part.name: held_out_loss(
            model,
            held_out_batches(
                part.source.held_out,
                context=config.model.context,
                batch_sequences=config.train.micro_batch,
                tokens=round(part.weight * config.train.evaluate_tokens),
                document_mask=config.data.document_mask,
                eos_id=data.eos_id,
                masking=masking(config, data),
            ),
            computation,
            rank=rank,
            ranks=ranks,
            add=add,
        )
        for part in data.parts
    }
    if config.data.mixture is None:
        return {"val_loss": losses[data.name]}
    mean = sum(part.weight * losses[part.name] for part in data.parts)
    return {"val_loss": mean, "source_val_losses": losses}
