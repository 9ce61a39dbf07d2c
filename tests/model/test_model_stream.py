"""The carried stream against the plain picture: one wide tensor of which each layer sees a prefix."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from entasis.model.stream import ResidualStream


@settings(max_examples=200, deadline=None)
@given(first=st.integers(1, 12), widths=st.lists(st.integers(1, 16), max_size=10))
def test_a_prefix_of_one_wide_tensor(first: int, widths: list[int]) -> None:
    wide = torch.zeros(2, 3, max(first, *widths, 1))
    wide[..., :first] = torch.randn(2, 3, first)
    stream = ResidualStream(wide[..., :first].clone())
    for number, width in enumerate(widths):
        stream = stream.resized(width)
        assert torch.equal(stream.prefix, wide[..., :width])
        wide[..., :width] += number
        stream = stream.updated(stream.prefix + number)
    everything = stream.resized(wide.shape[-1])
    assert torch.equal(everything.prefix, wide)
    assert everything.carried == ()


def test_resizing_changes_no_tensor_and_lets_gradients_through() -> None:
    def pieces(stream: ResidualStream) -> list[Tensor]:
        return [stream.prefix, *stream.carried]

    state = torch.randn(1, 2, 10, requires_grad=True)
    streams = [ResidualStream(state)]
    for width in (6, 2, 7, 4, 13):
        streams.append(streams[-1].resized(width))
    versions = [tensor._version for stream in streams for tensor in pieces(stream)]
    assert set(versions) == {0}
    streams[-1].prefix.sum().backward()  # type: ignore[no-untyped-call]
    assert state.grad is not None
    assert torch.equal(state.grad, torch.ones_like(state))


def test_what_is_set_aside_does_not_keep_the_wide_state() -> None:
    stream = ResidualStream(torch.randn(2, 3, 10)).resized(6)
    assert [piece.untyped_storage().nbytes() for piece in stream.carried] == [2 * 3 * 4 * 4]
