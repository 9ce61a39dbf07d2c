"""Several splits as one: their windows are numbered one after the other, each split keeping its own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from entasis.data.token_split import Int64Array, TokenSplit


class MixedSplit:
    """The same side of several sources. Windows never cross from one source into another."""

    def __init__(self, parts: Sequence[TokenSplit], weights: Sequence[float]) -> None:
        """At least one part, each with the share that it is to have of the sequences of training."""
        self.parts = tuple(parts)
        self.weights = tuple(weights)
        self.tokens = sum(part.tokens for part in parts)

    @property
    def starts_follow_end(self) -> bool:
        """As `TokenSplit`: of every part."""
        return all(part.starts_follow_end for part in self.parts)

    def windows(self, context: int) -> int:
        """Windows of all parts."""
        return sum(part.windows(context) for part in self.parts)

    def require_window(self, context: int) -> int:
        """`windows`; no part may be without one.

        Raises:
            ConfigError: a part is shorter than one window.
        """
        return sum(part.require_window(context) for part in self.parts)

    def window(self, index: int, context: int) -> Int64Array:
        """As `TokenSplit`."""
        part, own = self._part(index, context)
        return part.window(own, context)

    def window_starts(self, index: int, context: int) -> Int64Array:
        """As `TokenSplit`."""
        part, own = self._part(index, context)
        return part.window_starts(own, context)

    def window_place(self, index: int, context: int, place: int = 0) -> str:
        """As `TokenSplit`."""
        part, own = self._part(index, context)
        return part.window_place(own, context, place)

    def first_windows(self, context: int) -> list[int]:
        """Number of each part's first window."""
        return [0, *accumulate(part.windows(context) for part in self.parts)][:-1]

    def _part(self, index: int, context: int) -> tuple[TokenSplit, int]:
        if not 0 <= index < self.windows(context):
            raise IndexError(f"window {index} of {self.windows(context)}")
        firsts = self.first_windows(context)
        number = bisect_right(firsts, index) - 1
        return self.parts[number], index - firsts[number]
