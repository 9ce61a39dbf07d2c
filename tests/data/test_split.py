"""The held-out split: always something on both sides, and stable."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entasis.data.split import choose_held_out, cut_tail, smallest_held_out


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=60), st.floats(0.001, 0.999))
def test_both_sides_get_documents_and_enough_is_held_out(sizes: list[int], fraction: float) -> None:
    sizes_array = np.array(sizes, np.int64)
    held_out = choose_held_out(sizes_array, fraction)
    assert 0 < held_out.sum() < len(sizes)
    if held_out.sum() < len(sizes) - 1:
        assert sizes_array[held_out].sum() >= smallest_held_out(sum(sizes))


def test_share_is_about_what_was_asked_for() -> None:
    held_out = choose_held_out(np.full(100_000, 1000, np.int64), 0.01)
    assert held_out.sum() == pytest.approx(1000, rel=0.15)


def test_documents_keep_their_side_when_others_are_added() -> None:
    sizes = np.full(20_000, 1000, np.int64)
    before, after = choose_held_out(sizes[:15_000], 0.02), choose_held_out(sizes, 0.02)
    assert (after[:15_000] == before).all()


@given(st.text(min_size=2, max_size=3000), st.floats(0.001, 0.999))
def test_tail_and_head_are_the_text(text: str, fraction: float) -> None:
    head, tail = cut_tail(text, fraction)
    assert head + tail == text
    assert head
    assert tail
