"""Packed documents: where each one begins in a window, and from that alone both positions and attention mask.

The one source is an integer tensor (batch, time) with the number of the document that each token belongs to; a document
begins wherever that number changes.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def document_starts(documents: Int[Tensor, "batch time"]) -> Bool[Tensor, "batch time"]:
    """True at the first token of each document; the first token of a window is one."""
    changes = documents[:, 1:] != documents[:, :-1]
    return torch.cat([torch.ones_like(documents[:, :1], dtype=torch.bool), changes], dim=1)


def document_positions(documents: Int[Tensor, "batch time"]) -> Int[Tensor, "batch time"]:
    """Tokens since the document's beginning, from 0."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    beginning = torch.where(document_starts(documents), index, 0).cummax(dim=1).values
    return index - beginning


def document_mask(documents: Int[Tensor, "batch time"], *, causal: bool = True) -> Bool[Tensor, "batch 1 time time"]:
    """True where a token (third dimension) may attend to another (fourth): the same document and, if causal, not later.

    Every token may attend to itself, so that no row of the softmax is empty.
    """
    number = document_starts(documents).cumsum(dim=1)
    same = number[:, :, None] == number[:, None, :]
    return (torch.tril(same) if causal else same).unsqueeze(1)
