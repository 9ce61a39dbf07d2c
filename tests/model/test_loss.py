"""The loss in chunks equals the plain loss, in value and gradients, and never holds all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from entasis.model.loss import IGNORED, summed_cross_entropy

_TOKENS, _WIDTH, _VOCAB = 23, 6, 97
_CHUNKS = [1, 2, 5, 11, 12, 22, 23, 24, 1000, None]


def _inputs(dtype: torch.dtype, *, ignored: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(7)
    hidden = torch.randn(_TOKENS, _WIDTH, generator=random, dtype=torch.float64).mul(3).to(dtype)
    weight = torch.randn(_VOCAB, _WIDTH, generator=random, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, _VOCAB, (_TOKENS,), generator=random)
    targets[torch.randperm(_TOKENS, generator=random)[:ignored]] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def _plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight), targets, ignore_index=IGNORED, reduction="sum")


def _value_and_gradients(loss: Tensor, hidden: Tensor, weight: Tensor, factor: float = 1.0) -> tuple[Tensor, ...]:
    return (loss.detach(), *torch.autograd.grad(loss * factor, (hidden, weight)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("ignored", [0, 9, _TOKENS - 1])
@pytest.mark.parametrize("chunk", _CHUNKS)
def test_equals_the_plain_loss(chunk: int | None, ignored: int, dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, targets = _inputs(dtype, ignored=ignored)
    # Divided by the count and by accumulation afterwards, as the loop does: the factor must reach both gradients.
    ours = _value_and_gradients(
        summed_cross_entropy(hidden, weight, targets, chunk_tokens=chunk), hidden, weight, factor=0.37
    )
    plain = _value_and_gradients(_plain(hidden, weight, targets), hidden, weight, factor=0.37)
    for left, right in zip(ours, plain, strict=True):
        assert left.dtype == right.dtype == dtype
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance * 10)


def test_gradients_by_finite_differences() -> None:
    hidden, weight, targets = _inputs(torch.float64, ignored=4)
    assert torch.autograd.gradcheck(
        lambda h, w: summed_cross_entropy(h, w, targets, chunk_tokens=5), (hidden, weight), fast_mode=True
    )


def test_all_ignored_gives_exactly_zero() -> None:
    hidden, weight, targets = _inputs(torch.float32, ignored=_TOKENS)
    value, *gradients = _value_and_gradients(
        summed_cross_entropy(hidden, weight, targets, chunk_tokens=4), hidden, weight
    )
    assert value == 0
    assert all(gradient.abs().max() == 0 for gradient in gradients)


def test_extreme_logits_stay_finite() -> None:
    hidden, weight, targets = _inputs(torch.float32)
    with torch.no_grad():
        hidden *= 1e4
    for left, right in zip(
        _value_and_gradients(summed_cross_entropy(hidden, weight, targets, chunk_tokens=4), hidden, weight),
        _value_and_gradients(_plain(hidden, weight, targets), hidden, weight),
        strict=True,
    ):
        assert torch.isfinite(left).all()
        torch.testing.assert_close(left, right)


def test_tied_weights_get_both_gradients() -> None:
    """The table is the embedding too, as in GPT-2."""
    tokens, targets = torch.arange(10) % 7, torch.arange(1, 11) % 7
    results = []
    losses: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda h, w: summed_cross_entropy(h, w, targets, chunk_tokens=3),
        lambda h, w: _plain(h, w, targets),
    ]
    for loss in losses:
        table = torch.linspace(-1, 1, 7 * 4, dtype=torch.float64).reshape(7, 4).requires_grad_()
        torch.autograd.backward(loss(functional.embedding(tokens, table).tanh(), table))
        assert table.grad is not None
        results.append(table.grad)
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [5, None])
def test_without_gradients(chunk: int | None) -> None:
    hidden, weight, targets = _inputs(torch.float64)
    with torch.no_grad():
        value = summed_cross_entropy(hidden, weight, targets, chunk_tokens=chunk)
    assert not value.requires_grad
    torch.testing.assert_close(value, _plain(hidden, weight, targets).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("which", [0, 1])
def test_only_one_input_needs_a_gradient(which: int) -> None:
    hidden, weight, targets = _inputs(torch.float64, ignored=3)
    inputs = (hidden.detach(), weight.detach())
    inputs[which].requires_grad_()
    (ours,) = torch.autograd.grad(summed_cross_entropy(*inputs, targets=targets, chunk_tokens=4), inputs[which])
    (plain,) = torch.autograd.grad(_plain(*inputs, targets=targets), inputs[which])
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [4, None])
def test_under_autocast_products_are_bf16_and_the_reduction_is_float32(chunk: int | None) -> None:
    hidden, weight, targets = _inputs(torch.float32, ignored=3)
    exact = _value_and_gradients(_plain(hidden, weight, targets), hidden, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = _value_and_gradients(summed_cross_entropy(hidden, weight, targets, chunk_tokens=chunk), hidden, weight)
        logits = functional.linear(hidden, weight)
        assert logits.dtype == torch.bfloat16
    rounded = functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum").detach()
    assert [each.dtype for each in ours] == [torch.float32] * 3
    torch.testing.assert_close(ours[0], rounded, rtol=1e-6, atol=0), "only the products are rounded, not the sum"
    for left, right in zip(ours, exact, strict=True):
        torch.testing.assert_close(left, right, rtol=2e-2, atol=2e-2 * float(right.abs().max()))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(summed_cross_entropy(hidden, weight, targets, chunk_tokens=chunk), ours[0])


def test_bf16_states_as_autocast_leaves_them() -> None:
    hidden, weight, targets = _inputs(torch.float32)
    states = hidden.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, for_states, for_weight = _value_and_gradients(
            summed_cross_entropy(states, weight, targets), states, weight
        )
    assert (value.dtype, for_states.dtype, for_weight.dtype) == (torch.float32, torch.bfloat16, torch.float32)


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest tensor that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor):
                self.numbers = max(self.numbers, each.numel())
        return made


def _largest(loss: Callable[[], Tensor]) -> int:
    """Numbers in the largest tensor of a forward and, if there is one, a backward pass."""
    with _Largest() as seen:  # type: ignore[no-untyped-call]
        made = loss()
        if made.requires_grad:
            torch.autograd.backward(made)
    return int(seen.numbers)


def test_all_logits_are_never_held() -> None:
    tokens, width, vocab = 4096, 4, 20_000
    hidden = torch.zeros(tokens, width, requires_grad=True)
    weight = torch.zeros(vocab, width, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.int64)
    assert _largest(lambda: _plain(hidden[:64], weight, targets[:64])) >= 64 * vocab, "the watch works"
    chunked = _largest(lambda: summed_cross_entropy(hidden, weight, targets, chunk_tokens=16))
    assert chunked == 16 * vocab
    # The default holds some 64 MiB of float32 logits, whatever the vocabulary.
    assert _largest(lambda: summed_cross_entropy(hidden[:1700], weight, targets[:1700])) <= 2**24
    with torch.no_grad():
        assert _largest(lambda: summed_cross_entropy(hidden, weight, targets, chunk_tokens=16)) <= 16 * vocab
