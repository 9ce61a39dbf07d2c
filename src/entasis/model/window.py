"""Attention windows in blocks: a query meets the keys near it, and no matrix of all queries and all keys is made.

With a window of w tokens, token i attends to i - w + 1 .. i, itself included. The first w tokens see everything up to
themselves, which is plain causal attention. The tokens after them are cut into blocks of equal length; each block meets
its own keys and the w - 1 before them. Time and memory are so linear in time x window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional

from entasis.model.documents import document_mask, document_starts

LEAST_BLOCK = 64
"""Kernels work on tiles of about this many queries; shorter blocks would save nothing."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Attention of queries (batch, heads, time, dim) to keys and values under a mask; None: causal."""


@dataclass(frozen=True, slots=True)
class WindowMask:
    """Who may attend to whom in the two parts of a sequence that is longer than the window."""

    window: int
    """Tokens of the first part."""
    block: int
    """Queries of a block of the second part; its keys are `window - 1` more."""
    blocks: int
    first: Bool[Tensor, "batch 1 window window"] | None
    """Of the first part; None: causal."""
    rest: Bool[Tensor, "batch_blocks 1 block keys"]
    """Of the blocks, or of any one of them (then the first dimension is 1) when they are alike."""

    def attend(self, attend: Attend, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """What `attend` gives under this mask: (batch, heads, time, value_dim)."""
        window, time = self.window, queries.shape[2]
        first = attend(queries[:, :, :window], keys[:, :, :window], values[:, :, :window], self.first)
        # The last block is filled up with zeros. No query sees them as keys, and what they get as queries is cut off.
        padding = (0, 0, 0, self.blocks * self.block - (time - window))
        rest = functional.pad(queries[:, :, window:], padding)
        rest = _split(rest, 2, (self.blocks, self.block)).transpose(1, 2).flatten(0, 1)
        near_keys, near_values = (self._near(functional.pad(part[:, :, 1:], padding)) for part in (keys, values))
        attended = attend(rest, near_keys, near_values, self.rest)
        attended = _split(attended, 0, (-1, self.blocks)).transpose(1, 2).flatten(2, 3)
        return torch.cat([first, attended[:, :, : time - window]], dim=2)

    def _near(self, part: Tensor) -> Tensor:
        """(batch, heads, time, dim) -> (batch x blocks, heads, keys of a block, dim); neighbours overlap."""
        return part.unfold(2, self.block + self.window - 1, self.block).permute(0, 2, 1, 4, 3).flatten(0, 1)


Mask = Bool[Tensor, "batch 1 time time"] | WindowMask | None
"""Who may attend to whom; None: nothing is hidden but, if causal, what comes later."""


def attention_masks(
    windows: Iterable[int | None],
    time: int,
    documents: Int[Tensor, "batch time"] | None,
    *,
    causal: bool,
    device: torch.device,
) -> dict[int | None, Mask]:
    """The mask of each window (None: no window) for sequences of `time` tokens.

    Args:
        windows: of the layers, with repetitions.
        time: tokens of a sequence. A window that is as long or longer is none.
        documents: as for `Transformer.hidden`; attention stays inside a document.
        causal: whether attention without a window is; windows always are.
        device: where the masks are needed.
    """
    plain: Mask = None
    masks: dict[int | None, Mask] = {}
    for window in dict.fromkeys(windows):
        if window is not None and window < time:
            masks[window] = _window_mask(window, time, documents, device)
        else:
            if plain is None and documents is not None:
                plain = document_mask(documents, causal=causal)
            masks[window] = plain
    return masks


def _window_mask(
    window: int, time: int, documents: Int[Tensor, "batch time"] | None, device: torch.device
) -> WindowMask:
    rest = time - window
    blocks = math.ceil(rest / max(LEAST_BLOCK, window // 2))
    block = math.ceil(rest / blocks)
    # Query r of a block is its key r + window - 1, since the block's keys begin window - 1 before it.
    behind = torch.arange(block, device=device)[:, None] + window - 1 - torch.arange(block + window - 1, device=device)
    near = ((behind >= 0) & (behind < window))[None, None]
    if documents is None:
        return WindowMask(window, block, blocks, None, near)
    number = document_starts(documents).cumsum(dim=1)
    filled = functional.pad(number, (0, blocks * block - rest))
    queries = _split(filled[:, window:], 1, (blocks, block))[..., :, None]
    keys = filled[:, 1:].unfold(1, block + window - 1, block)[..., None, :]
    return WindowMask(
        window, block, blocks, document_mask(documents[:, :window]), ((queries == keys) & near).flatten(0, 1)[:, None]
    )


def _split(x: Tensor, dim: int, sizes: tuple[int, int]) -> Tensor:
    """`x` with one dimension made two."""
    split: Tensor = x.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return split
