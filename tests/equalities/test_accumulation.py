"""However a step is cut into passes, its loss and gradient are those of one mean over all its counted targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from entasis.data.dataset import TokenData
from entasis.data.stream import Batch, BatchStream
from entasis.model.transformer import Transformer
from entasis.run.config import RunConfig
from entasis.train import loop
from entasis.train.loop import train

MakeConfig = Callable[..., RunConfig]
Gradients = dict[str, Tensor]


class Looked(Exception):
    """The step was seen; the run need not go on."""


@pytest.fixture
def first_step(monkeypatch: pytest.MonkeyPatch, quiet: Console) -> Callable[[RunConfig], tuple[float, Gradients]]:
    """Loss and gradients of a run's first step, before clipping, as the loop makes them."""

    def look(config: RunConfig) -> tuple[float, Gradients]:
        seen: dict[str, Any] = {}

        def clip(parameters: Any, largest: float) -> Tensor:
            seen["gradients"] = [parameter.grad.clone() for parameter in parameters]
            return torch.zeros(())

        def check(loss: float, *_: object) -> None:
            seen["loss"] = loss
            raise Looked

        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
        monkeypatch.setattr(loop, "_skipped", check)
        with pytest.raises(Looked):
            train(config, quiet)
        names = [name for name, _ in _model(config).named_parameters()]
        return seen["loss"], dict(zip(names, seen["gradients"], strict=True))

    return look


def _model(config: RunConfig) -> Transformer:
    return Transformer(config.design(257).shape, config.block(257), seed=config.train.seed)


def _batch(config: RunConfig, step: int = 0) -> Batch:
    data = TokenData.open(Path(config.data.path))
    return BatchStream(
        data.train,
        context=config.model.context,
        batch_sequences=config.batch_sequences,
        seed=config.train.seed,
        eos_id=data.eos_id,
        document_mask=config.data.document_mask,
    ).batch(step)


def _one_pass(config: RunConfig) -> tuple[float, Gradients]:
    """The plain mean of torch over the whole step at once."""
    model, batch = _model(config), _batch(config)
    documents = None if batch.documents is None else torch.from_numpy(batch.documents)
    logits = model(torch.from_numpy(batch.tokens), documents).flatten(0, 1)
    loss = functional.cross_entropy(logits, torch.from_numpy(batch.targets).flatten(), ignore_index=-100)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}  # type: ignore[misc]


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("document_mask", [False, True], ids=["whole windows", "documents"])
@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8])
def test_equals_one_pass(
    micro_batch: int,
    document_mask: bool,
    style: str,
    make_config: MakeConfig,
    first_step: Callable[[RunConfig], tuple[float, Gradients]],
) -> None:
    config = make_config(
        {
            "train.batch_tokens": 8 * 16,
            "train.micro_batch": micro_batch,
            "data.document_mask": document_mask,
            "model.style": style,
        }
    )
    if document_mask and micro_batch < 8:
        counts = [_batch(config).part(at, at + micro_batch).counted for at in range(0, 8, micro_batch)]
        assert len(set(counts)) > 1, "micro-batches of one size cannot tell a mean from a mean of means"
    expected_loss, expected = _one_pass(config)
    loss, gradients = first_step(config)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert gradients.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6 * max(1.0, largest), msg=name)


def test_eleven_and_a_hundred_and_one_targets_are_not_averaged_as_equals(
    make_config: MakeConfig,
    first_step: Callable[[RunConfig], tuple[float, Gradients]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two passes with 11 and 101 counted targets: the mean of means is far off, and ours is not it."""
    config = make_config({"train.batch_tokens": 2 * 112, "model.context": 112, "train.micro_batch": 1})
    whole = _batch(config)
    targets = whole.targets.copy()
    targets[0, 11:], targets[1, 101:] = -100, -100
    cut = Batch(whole.tokens, targets, None)
    assert [cut.part(at, at + 1).counted for at in (0, 1)] == [11, 101]
    monkeypatch.setattr(BatchStream, "batch", lambda *_: cut)

    expected_loss, expected = _one_pass(config)
    loss, gradients = first_step(config)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=name)

    model = _model(config)
    for at in (0, 1):
        logits = model(torch.from_numpy(cut.tokens[at : at + 1]))[0]
        mean = functional.cross_entropy(logits, torch.from_numpy(targets[at]), ignore_index=-100)
        (mean / 2).backward()  # type: ignore[no-untyped-call]
    name = "embed.weight"
    wrong = dict(model.named_parameters())[name].grad
    assert wrong is not None
    assert float((wrong - expected[name]).norm() / expected[name].norm()) > 0.2


def test_a_step_reads_every_sequence_once(
    make_config: MakeConfig, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No last partial window of accumulation is dropped: the passes of a step are its whole batch, in order."""
    read: list[list[list[int]]] = []
    original = Transformer.hidden

    def hidden(self: Transformer, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled():
            read.append(tokens.tolist())
        return original(self, tokens, documents)

    monkeypatch.setattr(Transformer, "hidden", hidden)
    config = make_config({"train.batch_tokens": 6 * 16, "train.micro_batch": 2, "train.steps": 3})
    train(config, quiet)
    assert [len(each) for each in read] == [2] * 9
    assert list(chain.from_iterable(read)) == [row for step in range(3) for row in _batch(config, step).tokens.tolist()]


@pytest.mark.parametrize("clip", [0.05, None])
def test_clipping_is_of_the_whole_gradient(
    clip: float | None, make_config: MakeConfig, quiet: Console, outcome: Callable[[Path], Any]
) -> None:
    """What is logged is the norm before clipping; one first step with the clipped gradient, from Adam's own state."""
    config = make_config({"optimizer.clip": clip, "train.steps": 1, "train.batch_tokens": 8 * 16})
    _, gradients = _one_pass(config)
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
    assert norm > 0.05
    train(config, quiet)
    after = outcome(Path(config.out))
    assert after.metrics[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    factor = 1.0 if clip is None else clip / norm
    for name, gradient in gradients.items():
        # After one step Adam's first moment is (1 - 0.9) of the gradient.
        torch.testing.assert_close(
            after.optimizer[f"{name}:exp_avg"], 0.1 * factor * gradient, rtol=1e-3, atol=1e-6, msg=name
        )
