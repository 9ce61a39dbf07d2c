"""Layers that differ are compiled, all of them: one graph for the whole model, or one for each distinct layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch._dynamo.testing import CompileCounter

from entasis.model.language_loss import LanguageLoss
from entasis.model.transformer import Transformer
from entasis.run.config import RunConfig
from entasis.run.folder import RunFolder
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape
from entasis.train.loop import train
from entasis.train.parallel import compile_blocks

DISTINCT = 11


@pytest.fixture
def model() -> Transformer:
    """More distinct layers than the compiler allows graphs of one function, and some that repeat."""
    widths = [8 + 4 * number for number in range(DISTINCT)]
    layers = tuple(LayerShape(width=width, heads=2, kv_heads=2, head_dim=4, mlp_hidden=16) for width in widths)
    config = ModelConfig.from_dict({"vocab_size": 50, "context": 8, "style": "llama"})
    return Transformer(Shape((*layers, layers[0], layers[0]), embed_width=64), config)


@pytest.fixture
def counter() -> Iterator[Any]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield CompileCounter()
    torch._dynamo.reset()


def passes(loss: LanguageLoss) -> list[float]:
    tokens = torch.arange(16).view(2, 8)
    found = []
    for _ in range(2):
        total, _ = loss(tokens, tokens)
        total.backward()
        found.append(total.item())
    return found


def test_the_whole_model_is_one_graph(model: Transformer, counter: Any) -> None:
    expected = passes(LanguageLoss(model))
    assert passes(LanguageLoss(model, torch.compile(model.hidden, backend=counter))) == pytest.approx(expected)
    assert counter.frame_count == 1


def test_blocks_that_differ_are_all_compiled(model: Transformer, counter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two last are the first again, but their input lies otherwise in memory: a narrow part of a wide stream."""
    expected = passes(LanguageLoss(model))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    compile_blocks(model)
    assert passes(LanguageLoss(model)) == pytest.approx(expected)
    assert counter.frame_count == DISTINCT + 2
    assert not any("_orig_mod" in name for name in model.state_dict())


def test_blocks_that_are_alike_share_a_graph(counter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LayerShape(width=8, heads=2, kv_heads=2, head_dim=4, mlp_hidden=16)
    config = ModelConfig.from_dict({"vocab_size": 50, "context": 8, "style": "llama"})
    model = Transformer(Shape((layer,) * 6, embed_width=8), config)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    compile_blocks(model)
    passes(LanguageLoss(model))
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_compiled_ranks_have_the_losses_of_one(
    strategy: str,
    make_config: Callable[..., RunConfig],
    on_ranks: Any,
    quiet: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Traced and differentiated as in earnest, but not turned into machine code, which takes minutes."""
    changes = {"train.steps": 4, "train.micro_batch": 1}
    alone = make_config(changes)
    alone = alone.model_copy(update={"out": alone.out + "-alone"})
    train(alone, quiet)
    config = make_config({**changes, "train.compile": True, "parallel.strategy": strategy})
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    assert on_ranks(2, lambda _: train(config, quiet)) == {}
    found, expected = (RunFolder(Path(each.out)).read_metrics() for each in (config, alone))
    for one, other in zip(found, expected, strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-5)
