"""What a run's model has to predict: the next token, or, of an encoder, the tokens that are hidden from it."""

from __future__ import annotations

from entasis.data.dataset import TokenSource
from entasis.data.masking import Masking
from entasis.run.config import RunConfig


def masking(config: RunConfig, data: TokenSource) -> Masking | None:
    """What is hidden from the run's model, in training and on held-out text; None: it predicts the next token.

    The mask id is the one after the data's own: `RunConfig.block` makes room for it, and no text can hold it.
    """
    if config.mask_share is None:
        return None
    return Masking(config.mask_share, mask_id=data.vocab_size, eos_id=data.eos_id)
