"""Ranks under bfloat16: products in it, weights and optimizer state in float32, gradients added up as asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from entasis.run.checkpoint import load_newest
from entasis.run.config import RunConfig
from entasis.run.folder import RunFolder
from entasis.train.loop import train

STEPS = 6


@pytest.fixture
def curve(
    make_config: Callable[..., RunConfig],
    on_ranks: Callable[[int, Callable[[int], object]], dict[int, str]],
    quiet: Console,
    tmp_path: Path,
) -> Callable[..., list[float]]:
    """Trains on so many ranks and gives the losses of all steps and the last held-out loss."""

    def losses(name: str, ranks: int, **parallel: Any) -> list[float]:
        changes = {"train.steps": STEPS, "train.precision": "bf16", "train.micro_batch": 1, "parallel": parallel}
        config = make_config(changes, out=tmp_path / name)
        if ranks == 1:
            train(config, quiet)
        else:
            assert on_ranks(ranks, lambda _: train(config, quiet)) == {}
        saved = load_newest(tmp_path / name / "checkpoints", report=pytest.fail)
        assert saved is not None
        assert {tensor.dtype for tensor in (saved.model | saved.optimizer).values()} == {torch.float32}
        records = RunFolder(tmp_path / name).read_metrics()
        return [*(record["train_loss"] for record in records), records[-1]["val_loss"]]

    return losses


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_have_the_losses_of_one(strategy: str, curve: Callable[..., list[float]]) -> None:
    alone = curve("alone", 1)
    exact = curve(strategy, 2, strategy=strategy)
    assert len(exact) == STEPS + 1
    # FSDP also gathers the gains of norms in bfloat16, which autocast leaves in float32.
    assert exact == pytest.approx(alone, rel=1e-5 if strategy == "ddp" else 1e-3)


@pytest.mark.slow
def test_sums_in_bfloat16(curve: Callable[..., list[float]]) -> None:
    exact = curve("float32 sums", 2, strategy="fsdp")
    rounded = curve("bfloat16 sums", 2, strategy="fsdp", reduce_dtype="bf16")
    assert rounded == pytest.approx(exact, rel=1e-3)
    assert rounded[0] == exact[0], "before the first update no sum has been rounded"
    assert rounded != exact, "the sums are not in bfloat16"


def test_sums_in_bfloat16_under_ddp_need_cuda(
    make_config: Callable[..., RunConfig],
    on_ranks: Callable[[int, Callable[[int], object]], dict[int, str]],
    quiet: Console,
) -> None:
    config = make_config({"train.micro_batch": 1, "parallel": {"strategy": "ddp", "reduce_dtype": "bf16"}})
    said = on_ranks(2, lambda _: train(config, quiet))
    assert set(said) == {0, 1}
    assert all(
        line.startswith("ConfigError: parallel.reduce_dtype: bf16 under ddp needs CUDA") for line in said.values()
    )
