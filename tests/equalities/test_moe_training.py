"""Training a mixture of experts: the routers' loss in the gradient, in the metrics, and nowhere else."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from entasis.data.dataset import TokenData
from entasis.data.stream import Batch, BatchStream
from entasis.model.moe import Routing, router_loss
from entasis.model.transformer import Transformer
from entasis.run.config import RunConfig
from entasis.train import loop
from entasis.train.interrupt import Interrupted
from entasis.train.loop import train
from entasis.train.router import RouterStep
from entasis.train.schedule import learning_rate

MakeConfig = Callable[..., RunConfig]
Outcome = Any
LAYERS = [
    {"width": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp_hidden": 16, "experts": 4, "experts_per_token": 2},
    {"width": 16, "heads": 1, "kv_heads": 1, "head_dim": 8, "mlp_hidden": 24},
    {"width": 24, "heads": 2, "kv_heads": 2, "head_dim": 12, "mlp_hidden": 8, "experts": 3, "experts_per_token": 1},
]


@pytest.fixture
def make_moe(make_config: MakeConfig) -> MakeConfig:
    """The tiny run with experts in its first and last layer."""

    def make(changes: dict[str, Any] | None = None, *, out: Path | None = None) -> RunConfig:
        return make_config({"shape.layers": LAYERS, **(changes or {})}, out=out)

    return make


def first_batch(config: RunConfig) -> Batch:
    data = TokenData.open(Path(config.data.path))
    return BatchStream(
        data.train,
        context=config.model.context,
        batch_sequences=config.batch_sequences,
        seed=config.train.seed,
        eos_id=data.eos_id,
    ).batch(0)


def by_hand(config: RunConfig, parts: int) -> tuple[float, float, dict[str, Tensor], list[list[float]]]:
    """Language loss, routers' loss, gradients and load of the first step, cut into equal parts."""
    model, batch = Transformer(config.design(257).shape, config.block(257), seed=config.train.seed), first_batch(config)
    language, of_routers = torch.zeros(()), torch.zeros(())
    counts: list[Tensor] = []
    for tokens, targets in zip(
        torch.from_numpy(batch.tokens).chunk(parts), torch.from_numpy(batch.targets).chunk(parts), strict=True
    ):
        routings: list[Routing] = []
        logits = functional.linear(model.hidden(tokens, None, routings), model.head_weight)
        language = language + functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        of_routers = of_routers + router_loss(routings) / parts
        here = [routing.counts() for routing in routings]
        counts = [a + b for a, b in zip(counts, here, strict=True)] if counts else here
    language = language / batch.counted
    torch.autograd.backward(language + config.train.router_loss * of_routers)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    load = [(each / each.sum()).tolist() for each in counts]
    return language.item(), of_routers.item(), gradients, load  # type: ignore[return-value]


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("weight", [0.0, 0.01, 0.5])
def test_the_first_step(
    micro_batch: int, weight: float, make_moe: MakeConfig, quiet: Console, outcome: Callable[[Path], Outcome]
) -> None:
    config = make_moe({
        "train.micro_batch": micro_batch, "train.router_loss": weight, "train.steps": 1, "optimizer.clip": None,
    })  # fmt: skip
    language, of_routers, gradients, load = by_hand(config, parts=config.batch_sequences // micro_batch)
    train(config, quiet)
    after = outcome(Path(config.out))
    (record,) = after.metrics
    assert record["train_loss"] == pytest.approx(language, rel=1e-5), "without the routers' loss"
    assert record["router_loss"] == pytest.approx(of_routers, rel=1e-5), "not weighted"
    assert of_routers > 2, "about one per layer, and the z-loss"
    assert set(record["expert_load"]) == {"1", "3"}
    for found, expected in zip(record["expert_load"].values(), load, strict=True):
        assert found == pytest.approx(expected, abs=6e-5)
        assert sum(found) == pytest.approx(1, abs=1e-3)
    for name, gradient in gradients.items():
        # After one step Adam's first moment is (1 - 0.9) of the gradient.
        torch.testing.assert_close(after.optimizer[f"{name}:exp_avg"], 0.1 * gradient, rtol=1e-3, atol=1e-7, msg=name)


def test_the_weight_reaches_the_routers(make_moe: MakeConfig) -> None:
    """The check above can see the weight."""
    routers = [by_hand(make_moe({"train.router_loss": each}), 1)[2]["layers.0.mlp.router.weight"] for each in (0, 0.5)]
    assert (routers[0] - routers[1]).norm() > 0.1 * routers[0].norm()


def test_load_is_written_where_it_is_evaluated(
    make_moe: MakeConfig, quiet: Console, outcome: Callable[[Path], Outcome]
) -> None:
    config = make_moe()
    train(config, quiet)
    metrics = outcome(Path(config.out)).metrics
    assert [record["step"] for record in metrics if "expert_load" in record] == [4, 8, 12]
    assert all("router_loss" in record for record in metrics)
    assert metrics[-1]["train_loss"] < metrics[0]["train_loss"] - 0.5, "it learns"
    assert metrics[-1]["val_loss"] == pytest.approx(metrics[-1]["train_loss"], abs=1.0), "held-out loss has no routers'"


def test_stopped_and_gone_on_is_the_run_in_one_go(
    make_moe: MakeConfig,
    quiet: Console,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Callable[[Outcome, Outcome], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = make_moe(out=tmp_path / "whole")
    train(whole, quiet)
    halves = make_moe(out=tmp_path / "halves")

    def rate(config: RunConfig, step: int) -> float:
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return learning_rate(config, step)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "learning_rate", rate)
        with pytest.raises(Interrupted):
            train(halves, quiet)
    assert outcome(Path(halves.out)).step == 5
    train(halves, quiet)
    assert_same_bits(outcome(Path(halves.out)), outcome(Path(whole.out)))


def test_a_dense_run_knows_nothing_of_it(
    make_config: MakeConfig,
    quiet: Console,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Callable[[Outcome, Outcome], None],
    tmp_path: Path,
) -> None:
    runs = []
    for weight in (0.01, 5.0):
        config = make_config({"train.router_loss": weight, "train.steps": 4}, out=tmp_path / str(weight))
        train(config, quiet)
        runs.append(outcome(Path(config.out)))
    assert_same_bits(*runs)
    assert not any({"router_loss", "expert_load"} & set(record) for record in runs[0].metrics)
    step = RouterStep(make_config().design(257).shape, 0.01, 64)
    loss = torch.ones(())
    assert step.added_to(loss, []) is loss
    assert step.record(load=True) == {}
