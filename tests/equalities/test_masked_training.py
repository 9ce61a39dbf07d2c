"""Encoders in training: nothing leaks, nothing depends on cuts, stops or evaluations, and what they learn is real."""

from __future__ import annotations

import math
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from entasis.data.dataset import TokenData
from entasis.data.documents import Sources
from entasis.data.prepare import Preparation, prepare_data
from entasis.data.stream import Batch, BatchStream
from entasis.errors import ConfigError, EntasisError
from entasis.evaluate import sources
from entasis.generate.sample import generate_text
from entasis.model.transformer import Transformer
from entasis.run.config import RunConfig
from entasis.run.folder import RunFolder
from entasis.run.load import load_run
from entasis.run.objective import masking
from entasis.shape.budget import budget
from entasis.train import loop
from entasis.train.interrupt import Interrupted
from entasis.train.loop import train

MakeConfig = Callable[..., RunConfig]
Outcome = Any
Same = Callable[[Outcome, Outcome], None]
Gradients = dict[str, Tensor]

_ENCODER = {"model.causal": False}


class Looked(Exception):
    """The step was seen; the run need not go on."""


def _first_step(config: RunConfig, console: Console) -> tuple[float, Gradients]:
    """Loss and gradients of a run's first step, before clipping, as the loop makes them."""
    seen: dict[str, Any] = {}

    def clip(parameters: Any, largest: float) -> Tensor:
        seen["gradients"] = [parameter.grad.clone() for parameter in parameters]
        return torch.zeros(())

    def check(loss: float, *_: object) -> None:
        seen["loss"] = loss
        raise Looked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
        patch.setattr(loop, "_skipped", check)
        with pytest.raises(Looked):
            train(config, console)
    names = [name for name, _ in _model(config).named_parameters()]
    return seen["loss"], dict(zip(names, seen["gradients"], strict=True))


def _model(config: RunConfig) -> Transformer:
    return Transformer(config.design(257).shape, config.block(257), seed=config.train.seed)


def _stream(config: RunConfig) -> BatchStream:
    data = TokenData.open(Path(config.data.path))
    return BatchStream(
        data.train,
        context=config.model.context,
        batch_sequences=config.batch_sequences,
        seed=config.train.seed,
        eos_id=data.eos_id,
        document_mask=config.data.document_mask,
        masking=masking(config, data),
    )


def _logits(model: Transformer, batch: Batch) -> Tensor:
    documents = None if batch.documents is None else torch.from_numpy(batch.documents)
    logits: Tensor = model(torch.from_numpy(batch.tokens), documents)
    return logits


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_an_encoder_stores_what_is_counted_one_id_more_than_the_data_has(style: str, make_config: MakeConfig) -> None:
    config = make_config({**_ENCODER, "model.style": style})
    data = TokenData.open(Path(config.data.path))
    made = masking(config, data)
    assert made is not None
    assert made.mask_id == data.vocab_size == config.block(data.vocab_size).vocab_size - 1
    assert _model(config).parameter_count == budget(config.design(257).shape, config.block(257)).parameters
    causal = make_config({"model.style": style})
    assert masking(causal, data) is None
    assert causal.block(257).vocab_size == 257


@pytest.mark.parametrize("document_mask", [False, True], ids=["whole windows", "documents"])
def test_no_hidden_token_is_seen(document_mask: bool, make_config: MakeConfig) -> None:
    """Whatever stood at the hidden places, batch and logits are the same bits."""
    config = make_config({**_ENCODER, "data.document_mask": document_mask})
    stream = _stream(config)
    batch = stream.batch(0)
    hidden = batch.targets != -100
    assert hidden.any()

    cutter = stream._cutter

    class Changed:
        def cut(self, windows: list[int]) -> Batch:
            plain = cutter.cut(windows)
            tokens = np.where(hidden, (plain.tokens + 1) % 256, plain.tokens)
            return Batch(tokens, plain.targets, plain.documents)

    stream._cutter = Changed()  # type: ignore[assignment]
    changed = stream.batch(0)
    assert (changed.targets[hidden] == (batch.targets[hidden] + 1) % 256).all()
    assert (changed.tokens == batch.tokens).all()
    model = _model(config)
    with torch.no_grad():
        assert torch.equal(_logits(model, changed), _logits(model, batch))
        seen = batch.tokens.copy()
        seen[~hidden] = (seen[~hidden] + 1) % 256
        assert (_logits(model, Batch(seen, batch.targets, batch.documents)) - _logits(model, batch)).abs().max() > 1e-3


@pytest.mark.parametrize("document_mask", [False, True], ids=["whole windows", "documents"])
@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8])
def test_however_a_step_is_cut_it_is_one_mean_over_its_hidden_tokens(
    micro_batch: int, document_mask: bool, make_config: MakeConfig, quiet: Console
) -> None:
    config = make_config(
        {
            **_ENCODER,
            "train.batch_tokens": 8 * 16,
            "train.micro_batch": micro_batch,
            "data.document_mask": document_mask,
        }
    )
    model, batch = _model(config), _stream(config).batch(0)
    assert len({batch.part(row, row + 1).counted for row in range(8)}) > 1, "or a mean of means would do"
    logits, targets = _logits(model, batch).flatten(0, 1), torch.from_numpy(batch.targets).flatten()
    expected = functional.cross_entropy(logits[targets != -100], targets[targets != -100])
    expected.backward()  # type: ignore[no-untyped-call]
    loss, gradients = _first_step(config, quiet)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("changes", [{}, {"model.style": "gpt2", "data.document_mask": True}], ids=["llama", "gpt2"])
def test_resuming_changes_no_bit(
    changes: dict[str, Any],
    make_config: MakeConfig,
    quiet: Console,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Same,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    train(make_config(_ENCODER | changes, out=tmp_path / "never stopped"), quiet)
    config = make_config(_ENCODER | changes)
    original = vars(loop)["learning_rate"]
    for stop in (2, 7, 11):

        def rate(config: RunConfig, step: int, stop: int = stop) -> float:
            if step == stop - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return float(original(config, step))

        with monkeypatch.context() as patch:
            patch.setattr(loop, "learning_rate", rate)
            with pytest.raises(Interrupted, match=f"step {stop} of 12"):
                train(config, quiet)
    train(config, quiet)
    assert_same_bits(outcome(Path(config.out)), outcome(tmp_path / "never stopped"))


def test_evaluating_more_often_changes_no_bit(
    make_config: MakeConfig, quiet: Console, outcome: Callable[[Path], Outcome], tmp_path: Path
) -> None:
    seldom = make_config(_ENCODER | {"train.evaluate_every": 4}, out=tmp_path / "seldom")
    often = make_config(_ENCODER | {"train.evaluate_every": 2}, out=tmp_path / "often")
    for config in (seldom, often):
        train(config, quiet)
    few, many = outcome(tmp_path / "seldom"), outcome(tmp_path / "often")
    for these, those in ((few.model, many.model), (few.optimizer, many.optimizer)):
        assert all(torch.equal(tensor, those[name]) for name, tensor in these.items())
    losses = [{record["step"]: record.get("val_loss") for record in each.metrics} for each in (few, many)]
    assert [losses[0][step] for step in (4, 8, 12)] == [losses[1][step] for step in (4, 8, 12)]
    assert losses[0][2] is None
    assert losses[1][2] is not None


def test_all_seeds_are_evaluated_on_the_same_masks(
    make_config: MakeConfig, quiet: Console, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: dict[int, list[list[int]]] = {0: [], 1: []}
    original = vars(sources)["held_out_loss"]
    for seed, batches in seen.items():

        def look(
            model: object, given: Any, computation: Any, batches: list[list[int]] = batches, **ranks: Any
        ) -> float:
            kept = list(given)
            batches.extend(batch.targets.flatten().tolist() for batch in kept)
            return float(original(model, kept, computation, **ranks))

        with monkeypatch.context() as patch:
            patch.setattr(sources, "held_out_loss", look)
            train(make_config(_ENCODER | {"train.seed": seed, "train.steps": 1}, out=tmp_path / str(seed)), quiet)
    assert seen[0] == seen[1] != []


def test_the_first_loss_is_that_of_no_knowledge(make_config: MakeConfig, quiet: Console) -> None:
    config = make_config(_ENCODER | {"train.steps": 1})
    train(config, quiet)
    (record,) = RunFolder(Path(config.out)).read_metrics()
    assert record["train_loss"] == pytest.approx(math.log(258), abs=0.3)
    assert record["val_loss"] == pytest.approx(math.log(258), abs=0.3)


def test_a_run_of_an_encoder_opens_again_and_generates_nothing(make_config: MakeConfig, quiet: Console) -> None:
    config = make_config(_ENCODER | {"train.steps": 2})
    train(config, quiet)
    loaded = load_run(Path(config.out), pytest.fail)
    assert (loaded.model.config.causal, loaded.model.config.vocab_size) == (False, 258)
    assert loaded.config == config
    with pytest.raises(ConfigError, match=r"^causal: false: an encoder [^\n]*$"):
        generate_text(loaded.model, loaded.tokenizer, "The sea")


@pytest.mark.parametrize(
    ("begun", "changed", "line"),
    [
        (_ENCODER, {}, r"^model\.causal: the run in .* was begun with False, and now it is True"),
        ({}, _ENCODER, r"^model\.causal: the run in .* was begun with True, and now it is False"),
        (_ENCODER, {**_ENCODER, "train.mask_share": 0.15}, r"^train\.mask_share: the run in .* was begun with None"),
    ],
)
def test_a_run_keeps_its_objective(
    begun: dict[str, Any], changed: dict[str, Any], line: str, make_config: MakeConfig, quiet: Console
) -> None:
    train(make_config(begun | {"train.steps": 1}), quiet)
    with pytest.raises(ConfigError, match=line):
        train(make_config(changed | {"train.steps": 1}), quiet)


def test_held_out_text_of_end_tokens_only_is_one_line(
    make_config: MakeConfig, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*_: object, **__: object) -> list[Batch]:
        return [Batch(np.full((1, 16), 256), np.full((1, 16), -100), None)]

    monkeypatch.setattr(sources, "held_out_batches", ends)
    with pytest.raises(EntasisError, match=r"^no held-out target counts: [^\n]*$"):
        train(make_config(_ENCODER | {"train.steps": 1}), quiet)


def test_an_encoder_learns_from_both_sides(make_config: MakeConfig, quiet: Console, tmp_path: Path) -> None:
    """Random letters, each with its capital after it: the loss falls below what the best causal model could reach.

    Token frequencies alone allow ln 16; from the left, each second token is certain and the others stay ln 8.
    """
    source = random.Random(0)
    texts = ["".join(letter + letter.upper() for letter in source.choices("abcdefgh", k=160)) for _ in range(12)]
    (tmp_path / "text.txt").write_text("\n\n".join(texts), encoding="utf-8")
    sources = Sources.find((str(tmp_path / "text.txt"),))
    data = prepare_data(Preparation(sources, held_out=0.3), tmp_path / "data", processes=1)
    counts = Counter(data.train.read(0, data.train.tokens).tolist())
    assert -sum(n / data.train.tokens * math.log(n / data.train.tokens) for n in counts.values()) > 2.7
    config = make_config(
        {
            **_ENCODER,
            "data.path": str(data.path),
            "shape": {"family": "uniform", "layers": 2, "width": 32, "heads": 4},
            "train.steps": 160,
            "train.batch_tokens": 16 * 16,
            "train.micro_batch": 16,
            "train.evaluate_every": 160,
            "train.evaluate_tokens": 1024,
            "train.checkpoint_every": 160,
            "optimizer.learning_rate": 1e-2,
            "schedule.warmup_steps": 20,
        }
    )
    train(config, quiet)
    assert RunFolder(Path(config.out)).read_metrics()[-1]["val_loss"] < math.log(8) / 2
