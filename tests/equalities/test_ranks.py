"""Several ranks train what one rank trains: the same losses, norms and held-out losses, whatever the strategy."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from entasis.data.dataset import TokenData
from entasis.data.stream import BatchStream
from entasis.errors import ConfigError, EntasisError
from entasis.run.config import RunConfig
from entasis.run.folder import RunFolder
from entasis.run.sections import ParallelSection
from entasis.train import loop, saver
from entasis.train.interrupt import Preempted
from entasis.train.loop import train
from entasis.train.parallel import SpreadModel
from entasis.train.schedule import learning_rate

MakeConfig = Callable[..., RunConfig]
OnRanks = Callable[[int, Callable[[int], object]], dict[int, str]]
Metrics = list[dict[str, Any]]


def layer(width: int, heads: int, head_dim: int, **others: int) -> dict[str, int]:
    return {"width": width, "heads": heads, "kv_heads": heads, "head_dim": head_dim, "mlp_hidden": 24, **others}


SHAPES: dict[str, list[dict[str, int]]] = {
    "uniform": [layer(16, 2, 8)] * 3,
    "prism": [layer(16, 1, 16), layer(16, 2, 8), layer(16, 4, 4)],
    "bowtie": [layer(18, 2, 8), layer(9, 2, 6), layer(18, 2, 8)],
    "moe": [
        layer(16, 2, 8, experts=3, experts_per_token=2),
        layer(12, 2, 6),
        layer(16, 2, 8, experts=4, experts_per_token=1),
    ],
}
"""Some widths that ranks cannot share evenly, and experts fewer than ranks."""

DDP = {"parallel.strategy": "ddp"}
FSDP = {"parallel.strategy": "fsdp"}
HYBRID = {"parallel.strategy": "hybrid", "parallel.shards": 2}


@pytest.fixture
def make(make_config: MakeConfig) -> MakeConfig:
    """The tiny run of a named shape: every step four passes, in which targets that count are shared unevenly."""

    def with_shape(shape: str, changes: dict[str, Any], *, out: Path | None = None) -> RunConfig:
        base = {
            "shape.layers": SHAPES[shape],
            "shape.embed_width": SHAPES[shape][0]["width"],
            "train.batch_tokens": 4 * 16,
            "train.micro_batch": 1,
            "train.evaluate_every": 6,
            "train.evaluate_tokens": 5 * 16,
            "train.checkpoint_every": 1000,
            "data.document_mask": True,
        }
        return make_config({**base, **changes}, out=out)

    return with_shape


@pytest.fixture
def run_on(on_ranks: OnRanks, quiet: Console) -> Callable[[int, RunConfig], dict[int, str]]:
    """Trains a run on so many ranks; what each that failed said."""
    return lambda size, config: on_ranks(size, lambda _: train(config, quiet))


def metrics(config: RunConfig) -> Metrics:
    return RunFolder(Path(config.out)).read_metrics()


def assert_same_curve(found: Metrics, expected: Metrics) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"tokens_per_second", "expert_load"}:
            # A norm amplifies rounding in the gradient of a token whose embedding is still small; losses do not see it.
            tolerance = 1e-4 if name == "grad_norm" else 1e-5
            assert one[name] == pytest.approx(other[name], rel=tolerance), (name, one["step"])
        for number, shares in one.get("expert_load", {}).items():
            assert shares == pytest.approx(other["expert_load"][number], abs=1e-3)


def check(make: MakeConfig, run_on: Any, quiet: Console, shape: str, size: int, changes: dict[str, Any]) -> None:
    alone = make(shape, {name: value for name, value in changes.items() if "parallel" not in name})
    alone = alone.model_copy(update={"out": alone.out + "-alone"})
    train(alone, quiet)
    config = make(shape, changes)
    assert run_on(size, config) == {}
    assert_same_curve(metrics(config), metrics(alone))


@pytest.mark.parametrize(
    ("shape", "size", "strategy"),
    [("moe", 2, DDP), ("moe", 2, FSDP), ("bowtie", 4, HYBRID)],
    ids=["ddp", "fsdp", "hybrid"],
)
def test_ranks_have_the_losses_of_one(
    shape: str, size: int, strategy: dict[str, Any], make: MakeConfig, run_on: Any, quiet: Console
) -> None:
    check(make, run_on, quiet, shape, size, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("size", "strategy"), [(2, DDP), (2, FSDP), (4, HYBRID)], ids=["ddp", "fsdp", "hybrid"])
def test_fifty_steps(
    shape: str, size: int, strategy: dict[str, Any], make: MakeConfig, run_on: Any, quiet: Console
) -> None:
    check(make, run_on, quiet, shape, size, {**strategy, "train.steps": 50, "train.evaluate_every": 25})


def test_the_ranks_shares_count_differently(make: MakeConfig) -> None:
    """The curves above would not agree if each rank divided by its own targets."""
    config = make("uniform", {})
    data = TokenData.open(Path(config.data.path))
    stream = BatchStream(
        data.train, context=16, batch_sequences=4, seed=0, eos_id=data.eos_id, document_mask=True
    )  # fmt: skip
    assert any(stream.batch(step, 0, 2).counted != stream.batch(step, 2, 4).counted for step in range(3))


@pytest.mark.parametrize("strategy", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_gradients_are_exchanged_once_a_step(
    strategy: dict[str, Any], make: MakeConfig, on_ranks: OnRanks, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four passes on each rank, and one exchange: of all gradients (DDP), or of each block and the rest (FSDP)."""
    config = make("bowtie", {**strategy, "train.batch_tokens": 8 * 16, "train.steps": 3})

    def work(_: int) -> None:
        exchanges = [0]

        def counting(function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                exchanges[0] += 1
                return function(*args, **kwargs)

            return call

        loss_of_pass = SpreadModel.loss_of_pass

        def watched(self: SpreadModel, *args: Any) -> Any:
            if strategy is DDP:
                exchanges[0] += self._module.require_backward_grad_sync
            return loss_of_pass(self, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SpreadModel, "loss_of_pass", watched)
            for name in ("reduce_scatter_tensor", "reduce_scatter_single"):  # the newer name, and the older
                if hasattr(torch.distributed, name):
                    patch.setattr(torch.distributed, name, counting(getattr(torch.distributed, name)))
            train(config, quiet)
        groups = 1 if strategy is DDP else len(SHAPES["bowtie"]) + 1
        assert exchanges[0] == 3 * groups, exchanges

    assert on_ranks(2, work) == {}


@pytest.fixture
def no_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("one process forms no group")

    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    yield


def test_one_process_forms_no_group(make: MakeConfig, quiet: Console, no_group: None) -> None:
    train(make("uniform", {"train.steps": 2, **FSDP}), quiet)


def test_one_process_of_torchrun_forms_one_where_a_strategy_asks_for_it(
    make: MakeConfig, run_on: Any, quiet: Console
) -> None:
    check(make, run_on, quiet, "uniform", 1, {**FSDP, "train.steps": 3})


def test_muon_on_two_ranks(make: MakeConfig, run_on: Any, quiet: Console) -> None:
    check(make, run_on, quiet, "bowtie", 2, {**DDP, "optimizer.name": "muon", "train.steps": 6})


def test_a_signal_to_one_rank_stops_all(
    make: MakeConfig, on_ranks: OnRanks, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make("uniform", {})

    def work(rank: int) -> None:
        def rate(config: RunConfig, step: int) -> float:
            if step == 4 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return learning_rate(config, step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "learning_rate", rate)
            train(config, quiet)

    said = on_ranks(2, work)
    assert set(said) == {0, 1}
    for line in said.values():
        assert line.startswith(f"{Preempted.__name__}: stopped by SIGTERM: step 5 of 12 is saved")
    alone = make("uniform", {}, out=Path(config.out + "-alone"))
    train(alone, quiet)
    train(config, quiet)
    assert_same_curve(metrics(config), metrics(alone))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the names of threads as Linux shows them")
@pytest.mark.parametrize("fails", [False, True])
def test_no_thread_of_the_exchange_is_left(make: MakeConfig, on_ranks: OnRanks, quiet: Console, fails: bool) -> None:
    """Else one that is late waits for the interpreter, and the end of the process for it."""
    config = make("uniform", {"train.steps": 4})

    def threads() -> list[str]:
        return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]

    def work(_: int) -> None:
        seen = []

        def rate(config: RunConfig, step: int) -> float:
            seen.append("gloo_tcp_loop" in threads())
            if fails and step == 2:
                raise EntasisError("as asked")
            return learning_rate(config, step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "learning_rate", rate)
            try:
                train(config, quiet)
            except EntasisError as error:
                assert str(error) == "as asked"
                assert "gloo_tcp_loop" not in threads(), "while the error still holds the frames of the run"
        assert seen == [True] * (3 if fails else 4)
        assert "gloo_tcp_loop" not in threads()

    assert on_ranks(2, work) == {}


def test_a_lost_rank_is_named(make: MakeConfig, on_ranks: OnRanks, quiet: Console) -> None:
    config = make("uniform", {})

    def work(rank: int) -> None:
        def rate(config: RunConfig, step: int) -> float:
            if step == 4 and rank == 2:
                os._exit(9)
            return learning_rate(config, step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "learning_rate", rate)
            patch.setattr("entasis.train.ranks._ROLL_CALL_SECONDS", 2.0)
            train(config, quiet)

    said = on_ranks(4, work)
    assert said[2] == "exit code 9"
    named = [line.partition(" ended or did not answer in time")[0] for rank, line in said.items() if rank != 2]
    # Ranks 1 and 3 are its neighbours; rank 0 learns of it when they have left.
    assert "LostRankError: rank 0: rank 2" in named
    for rank, line in zip((0, 1, 3), named, strict=True):
        assert line.startswith(f"LostRankError: rank {rank}: ")
        assert line.endswith("2"), line


def test_a_save_that_fails_stops_all(
    make: MakeConfig, on_ranks: OnRanks, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make("uniform", {"train.checkpoint_every": 3})

    def full(*_: Any) -> None:
        raise EntasisError("no room")

    def work(_: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saver, "save_checkpoint", full)
            train(config, quiet)

    said = on_ranks(2, work)
    assert said[0] == "EntasisError: no room"
    assert said[1] == "LostRankError: rank 1: stops, since rank 0 failed"


def test_a_batch_that_ranks_cannot_share(make: MakeConfig, quiet: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"batch_tokens 64 / model.context 16 = 4 sequences, which 3 ranks .* 3 seq"):
        train(make("uniform", {}), quiet)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel.strategy": "fsdp", "optimizer.name": "muon"}, "muon: it orthogonalises whole matrices"),
        ({"parallel.strategy": "hybrid"}, "shards: hybrid needs a number of them"),
        ({"parallel.shards": 2}, "shards 2: belongs to strategy hybrid"),
        ({"parallel.stratgy": "ddp"}, "parallel.stratgy: unknown setting"),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], message: str, make: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=message):
        make("uniform", changes)


def test_shards_that_do_not_divide_the_ranks(make: MakeConfig, run_on: Any) -> None:
    said = run_on(2, make("uniform", {"parallel.strategy": "hybrid", "parallel.shards": 3}))
    assert all("parallel.shards 3" in line and "2 ranks" in line for line in said.values()), said
    assert len(said) == 2


@pytest.mark.parametrize("shape", ["bowtie", "moe"])
def test_a_run_goes_on_under_other_strategies(shape: str, make: MakeConfig, on_ranks: OnRanks, quiet: Console) -> None:
    """Two ranks with DDP, then one, then two with FSDP2, then four hybrid: the losses of one process in one go."""
    config = make(shape, {"train.checkpoint_every": 3})
    whole = config.model_copy(update={"out": config.out + "-whole"})
    train(whole, quiet)

    def go_on(size: int, steps: int, strategy: dict[str, Any]) -> None:
        section = ParallelSection(**{name.partition(".")[2]: value for name, value in strategy.items()})
        changed = config.model_copy(update={"parallel": section})

        def work(_: int) -> None:
            def rate(config: RunConfig, step: int) -> float:
                if step == steps - 1 and steps < config.train.steps:
                    os.kill(os.getpid(), signal.SIGINT)
                return learning_rate(config, step)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(loop, "learning_rate", rate)
                train(changed, quiet)

        said = on_ranks(size, work)
        assert len(said) == (size if steps < config.train.steps else 0), said
        assert all(line.startswith("Interrupted") for line in said.values()), said

    for size, steps, strategy in ((2, 2, DDP), (1, 4, {}), (2, 7, FSDP), (4, 9, HYBRID), (1, 12, {})):
        go_on(size, steps, strategy)
    assert_same_curve(metrics(config), metrics(whole))
