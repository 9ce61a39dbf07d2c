"""Attention windows: what a query sees, against a dense mask, and what computing it in blocks costs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from entasis.model import transformer, window
from entasis.model.attention import Attention
from entasis.model.transformer import Transformer
from entasis.model.window import WindowMask, attention_masks
from entasis.shape.budget import budget
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape

CPU = torch.device("cpu")
LAYER = LayerShape(width=32, heads=4, kv_heads=2, head_dim=8, mlp_hidden=48, value_dim=6)
CONFIG = ModelConfig(vocab_size=97, context=256)


def dense(length: int, time: int, documents: Tensor | None) -> Tensor:
    """The definition: i attends to i - window + 1 .. i, inside its document."""
    i = torch.arange(time)
    behind = i[:, None] - i[None, :]
    mask = ((behind >= 0) & (behind < length))[None, None]
    return mask if documents is None else mask & (documents[:, None, :, None] == documents[:, None, None, :])


def random_documents(batch: int, time: int, seed: int) -> Tensor:
    """Numbers that grow: no document comes back."""
    begins = torch.rand(batch, time, generator=torch.Generator().manual_seed(seed)) < 0.1
    return begins.long().cumsum(dim=1)


def one_attention(seed: int = 0, **changes: Any) -> Attention:
    """In float64, with weights that make attention far from even."""
    layer = dataclasses.replace(LAYER, **changes)
    built = Attention(layer, layer.width, CONFIG).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return built


def compare(length: int, time: int, *, least: int, with_documents: bool, dtype: torch.dtype = torch.float64) -> None:
    """Updates and gradients in blocks against those under the dense mask."""
    attention = one_attention(seed=length).to(dtype)
    if dtype == torch.float32:  # as large as weights are, for a tolerance without a scale
        torch.nn.utils.vector_to_parameters(
            0.1 * torch.nn.utils.parameters_to_vector(attention.parameters()), attention.parameters()
        )
    documents = random_documents(2, time, seed=time) if with_documents else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window, "LEAST_BLOCK", least)
        mask = attention_masks([length], time, documents, causal=True, device=CPU)[length]
    assert isinstance(mask, WindowMask)
    x = torch.randn(2, time, 32, generator=torch.Generator().manual_seed(1), dtype=dtype).requires_grad_()
    wanted: list[Tensor] = []
    tolerance = 1e-10 if dtype == torch.float64 else 1e-6
    for each in (dense(length, time, documents), mask):
        update = attention(x, mask=each)
        found = [update, *torch.autograd.grad(update.square().mean(), [x, *attention.parameters()])]
        for left, right in zip(found, wanted or found, strict=True):
            torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)
        wanted = found


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_blocks_equal_a_dense_mask(data: st.DataObject) -> None:
    time = data.draw(st.integers(2, 60))
    length = data.draw(st.integers(1, time - 1))
    least = data.draw(st.integers(1, 20))
    compare(length, time, least=least, with_documents=data.draw(st.booleans()))


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize(("length", "time"), [(1, 200), (7, 200), (64, 199), (150, 330), (199, 200)])
def test_blocks_of_the_real_size(length: int, time: int, with_documents: bool) -> None:
    compare(length, time, least=window.LEAST_BLOCK, with_documents=with_documents)
    compare(length, time, least=window.LEAST_BLOCK, with_documents=with_documents, dtype=torch.float32)


def test_a_model_with_windows_equals_one_with_dense_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through rotary positions, layers of other windows and none, and a carried stream."""
    layers = (LAYER, dataclasses.replace(LAYER, window=3), dataclasses.replace(LAYER, width=16, window=70))
    model = Transformer(Shape(layers, 24), CONFIG).double()
    tokens = torch.randint(97, (2, 150), generator=torch.Generator().manual_seed(2))
    for documents in (None, random_documents(2, 150, seed=3)):
        found = model(tokens, documents)
        with monkeypatch.context() as patch:
            patch.setattr(
                transformer, "attention_masks",
                lambda windows, time, of, **_: {each: dense(each or time, time, of) for each in windows},
            )  # fmt: skip
            expected = model(tokens, documents)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        without = Transformer(Shape((LAYER, LAYER, layers[2]), 24), CONFIG).double()(tokens, documents)
        assert (without - expected).abs().max() > 1e-4, "the window matters"


def test_a_window_reaches_back_as_far_as_it_says() -> None:
    """The token itself counts: of one layer with a window of 3, token 9 depends on tokens 7, 8 and 9."""
    model = Transformer(Shape((dataclasses.replace(LAYER, window=3),), 24), CONFIG).double()
    tokens = torch.arange(14)[None]
    base = model(tokens)[0, 9]
    for at in range(14):
        changed = tokens.clone()
        changed[0, at] = 90
        assert torch.equal(model(changed)[0, 9], base) == (at not in {7, 8, 9}), at


def test_two_layers_reach_twice_as_far() -> None:
    model = Transformer(Shape((dataclasses.replace(LAYER, window=3),) * 2, 24), CONFIG).double()
    state = model.embed.weight[torch.arange(14)][None].detach().requires_grad_()
    (seen,) = torch.autograd.grad(_through(model, state)[0, 9].square().sum(), state)
    assert [at for at in range(14) if seen[0, at].abs().max() > 0] == [5, 6, 7, 8, 9]


def _through(model: Transformer, state: Tensor) -> Tensor:
    masks = attention_masks([3], state.shape[1], None, causal=True, device=CPU)
    state = functional.pad(state, (0, 32 - 24))
    for _, block in model.blocks():
        state, _ = block(state, None, masks[3])
    return state


@pytest.mark.parametrize("length", [16, 17, 1000])
@pytest.mark.parametrize("with_documents", [False, True])
def test_a_window_of_the_whole_sequence_is_none(length: int, with_documents: bool) -> None:
    documents = random_documents(2, 16, seed=1) if with_documents else None
    masks = attention_masks([None, length], 16, documents, causal=True, device=CPU)
    assert masks[length] is masks[None]
    assert (masks[None] is None) == (documents is None), "the common path has no mask"
    shape = Shape((LAYER,), 24)
    windowed = Shape((dataclasses.replace(LAYER, window=length),), 24)
    tokens = torch.randint(97, (2, 16))
    assert torch.equal(Transformer(windowed, CONFIG)(tokens, documents), Transformer(shape, CONFIG)(tokens, documents))
    assert budget(windowed, CONFIG, context=16) == budget(shape, CONFIG, context=16)


# --- costs ------------------------------------------------------------------------------------------------------------


def executed_products(length: int, time: int) -> int:
    """Queries times keys that are multiplied, per head: the first tokens among themselves, then blocks that overlap."""
    rest = time - length
    if rest <= 0:
        return time * time
    blocks = math.ceil(rest / max(64, length // 2))
    block = math.ceil(rest / blocks)
    return length * length + blocks * block * (block + length - 1)


def flops(model: Transformer, batch: int, time: int) -> int:
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.zeros(batch, time, dtype=torch.int64))
    return int(counter.get_total_flops())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("length", [1, 8, 64, 130, 199, 200, 256, None])
def test_what_is_executed_is_counted_but_for_the_overlap(kind: Literal["llama", "gpt2"], length: int | None) -> None:
    config = ModelConfig(vocab_size=97, context=200, style=kind)
    shape = Shape((dataclasses.replace(LAYER, window=length), LAYER), 32)
    time = config.context
    executed = flops(Transformer(shape, config), batch=2, time=time)
    attended = time if length is None else min(length, time)
    overlap = executed_products(length or time, time) - attended * time
    assert overlap >= 0
    if attended == time:
        assert overlap == 0
    of_overlap = 2 * LAYER.heads * (LAYER.head_dim + LAYER.value_head_dim) * overlap
    assert executed == 2 * (time * budget(shape, config).flops_per_token + of_overlap)


@pytest.mark.parametrize("length", [64, 256, 1024])
def test_executed_products_are_linear_in_time_and_window(length: int) -> None:
    for time in (4096, 8192, 65536):
        assert executed_products(length, time) < 2.1 * length * time
    assert executed_products(length, length + 1) < 1.1 * (length + 1) ** 2, "and near the dense ones at the start"


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most entries of any tensor that is made."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor) and each.numel():
                self.entries = max(self.entries, each.untyped_storage().size() // each.element_size())
        return result


@pytest.mark.parametrize("with_documents", [False, True])
def test_no_tensor_has_an_entry_for_each_pair_of_tokens(with_documents: bool) -> None:
    layer = dataclasses.replace(LAYER, window=16, heads=1, kv_heads=1)
    model = Transformer(Shape((layer,), 24), dataclasses.replace(CONFIG, vocab_size=11))
    largest = []
    for time in (1024, 4096):
        documents = random_documents(1, time, seed=1) if with_documents else None
        with _Largest() as mode:  # type: ignore[no-untyped-call]
            torch.autograd.backward(model(torch.zeros(1, time, dtype=torch.int64), documents).sum())
        largest.append(mode.entries)
    assert largest[1] < 4.2 * largest[0]
    assert largest[1] < 4096 * 512


@pytest.mark.slow
def test_windows_compile_as_one_graph() -> None:
    shape = Shape((LAYER, dataclasses.replace(LAYER, window=5)), 24)
    model = Transformer(shape, CONFIG)
    tokens, documents = torch.randint(97, (2, 80)), random_documents(2, 80, seed=1)
    compiled = torch.compile(model, fullgraph=True)
    for of in (None, documents):
        torch.testing.assert_close(compiled(tokens, of), model(tokens, of), rtol=1e-4, atol=1e-5)
