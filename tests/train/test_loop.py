"""The loop: what a run writes, what stops it, and what must not change it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from entasis.data.dataset import TokenData
from entasis.data.stream import BatchStream
from entasis.errors import ConfigError, EntasisError
from entasis.evaluate import sources
from entasis.run.checkpoint import NonFiniteError, load_newest
from entasis.run.config import RunConfig
from entasis.run.folder import RunFolder
from entasis.train import loop
from entasis.train.interrupt import Interrupted, StopRequest
from entasis.train.loop import train
from entasis.train.optimizer import Optimizer
from entasis.train.parallel import SpreadModel
from entasis.train.schedule import rate_share

MakeConfig = Callable[..., RunConfig]
Outcome = Any
Same = Callable[[Outcome, Outcome], None]


@pytest.fixture
def console(tmp_path: Path) -> Console:
    """A console whose text can be read with `_said`."""
    return Console(record=True, width=200, file=(tmp_path / "said.txt").open("w", encoding="utf-8"))


def _said(console: Console) -> str:
    return console.export_text(clear=False)


def _files(folder: Path) -> dict[str, bytes]:
    """Everything in a run folder, but what each start may write: the log and the lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in {"log.txt", ".lock"}
    }


# --- what a run writes ------------------------------------------------------------------------------------------------


def test_a_run_writes_what_it_promises(make_config: MakeConfig, console: Console) -> None:
    config = make_config({"train.evaluate_every": 5})
    train(config, console)
    folder = RunFolder(Path(config.out))
    names = {path.name for path in folder.path.iterdir()}
    assert {"config.yaml", "shape.json", "environment.json", "metrics.jsonl", "checkpoints", "log.txt"} <= names
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["step-00000009", "step-00000012"]
    records = folder.read_metrics()
    assert [record["step"] for record in records] == list(range(1, 13))
    assert [record["tokens"] for record in records] == [64 * step for step in range(1, 13)]
    assert [record["step"] for record in records if "val_loss" in record] == [5, 10, 12], "and always the last"
    keys = {"step", "tokens", "train_loss", "learning_rate", "grad_norm", "tokens_per_second"}
    assert all(record.keys() - {"val_loss"} == keys for record in records)
    assert [record["learning_rate"] for record in records] == [
        3e-3 * rate_share(config.schedule, step, 12) for step in range(12)
    ]
    assert records[-1]["train_loss"] < records[0]["train_loss"]
    assert _said(console).count("weight decay 0.1") == 1, "groups are printed once"
    assert "0 on 7 vectors" in _said(console)
    for line in folder.metrics_file.read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_the_first_loss_is_that_of_no_knowledge(make_config: MakeConfig, quiet: Console) -> None:
    config = make_config({"train.steps": 1})
    train(config, quiet)
    (record,) = RunFolder(Path(config.out)).read_metrics()
    assert record["train_loss"] == pytest.approx(torch.log(torch.tensor(257.0)).item(), abs=0.3)


def test_going_on_says_so_and_names_what_changed(make_config: MakeConfig, console: Console) -> None:
    train(make_config({"train.steps": 3}), console)
    first = _said(console)
    assert "goes on" not in first
    train(make_config({"train.steps": 3}), console)
    assert "already finished, 3 of 3 steps" in _said(console)
    with pytest.raises(ConfigError, match=r"^train\.steps: .* holds a run of 3 steps, and 2 are asked for"):
        train(make_config({"train.steps": 2}), console)
    config = make_config({"train.steps": 5, "train.keep_checkpoints": 1})
    train(config, console)
    said = _said(console)
    assert "goes on after step 3 of 5" in said
    assert "changed since the run began: train.steps: 3 -> 5" in said
    assert "changed since the run began: train.keep_checkpoints: 2 -> 1" in said
    log = RunFolder(Path(config.out)).log_file.read_text(encoding="utf-8")
    assert "goes on after step 3 of 5" in log
    assert RunFolder(Path(config.out)).read_config() == config


def test_a_run_that_was_shortened_to_its_warm_up_says_so(make_config: MakeConfig, console: Console) -> None:
    config = make_config({"train.steps": 3})
    train(config, console)
    line = "schedule.warmup_steps 3 is no less than train.steps 3: the learning rate only rises, to 0.003"
    assert line in _said(console)
    assert line in RunFolder(Path(config.out)).log_file.read_text(encoding="utf-8")
    train(make_config({"train.steps": 4}), console)
    assert _said(console).count("warmup_steps") == 1


def test_a_finished_run_keeps_the_record_of_what_it_ran_on(
    make_config: MakeConfig, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config({"train.steps": 2})
    train(config, quiet)
    before = _files(Path(config.out))
    monkeypatch.setattr(loop, "environment_record", lambda _: {"device": "another machine"})
    train(config, quiet)
    assert _files(Path(config.out)) == before


def test_a_damaged_checkpoint_is_said_and_the_older_one_used(
    make_config: MakeConfig,
    console: Console,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Same,
    tmp_path: Path,
) -> None:
    train(make_config(out=tmp_path / "whole"), console)
    config = make_config()
    train(config, console)
    newest = Path(config.out) / "checkpoints" / "step-00000012"
    (newest / "optimizer.safetensors").write_bytes(b"")
    train(config, console)
    said = _said(console)
    assert f"{newest / 'optimizer.safetensors'}: 0 bytes instead of" in said
    assert "looking for an older checkpoint" in said
    assert "goes on after step 9 of 12" in said
    assert_same_bits(outcome(Path(config.out)), outcome(tmp_path / "whole"))


def test_all_checkpoints_damaged_never_starts_anew_by_itself(make_config: MakeConfig, quiet: Console) -> None:
    config = make_config()
    train(config, quiet)
    for path in (Path(config.out) / "checkpoints").iterdir():
        (path / "complete.json").unlink()
    before = _files(Path(config.out))
    with pytest.raises(EntasisError, match="all 2 checkpoints are damaged"):
        train(config, quiet)
    assert _files(Path(config.out)) == before


@pytest.mark.slow
def test_a_compiled_run_saves_the_plain_names_and_learns_the_same(
    make_config: MakeConfig, quiet: Console, outcome: Callable[[Path], Outcome], tmp_path: Path
) -> None:
    changes = {"train.steps": 4, "train.checkpoint_every": 2}
    train(make_config(changes, out=tmp_path / "plain"), quiet)
    config = make_config({**changes, "train.compile": True})
    train(config, quiet)
    plain, compiled = outcome(tmp_path / "plain"), outcome(Path(config.out))
    assert compiled.model.keys() == plain.model.keys()
    assert compiled.optimizer.keys() == plain.optimizer.keys()
    for left, right in zip(plain.metrics, compiled.metrics, strict=True):
        assert right["train_loss"] == pytest.approx(left["train_loss"], rel=1e-5)
    train(make_config({**changes, "train.steps": 5}), quiet)
    assert outcome(Path(config.out)).step == 5, "goes on without compiling"


# --- what must not change a run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"train.evaluate_every": 2},
        {"train.evaluate_every": 1},
        {"train.evaluate_tokens": 16},
        {"train.checkpoint_every": 1},
        {"train.checkpoint_every": 100},
    ],
    ids=str,
)
def test_evaluating_or_saving_more_often_does_not_change_training(
    changes: dict[str, Any], make_config: MakeConfig, quiet: Console, outcome: Callable[[Path], Outcome], tmp_path: Path
) -> None:
    train(make_config(out=tmp_path / "plain"), quiet)
    config = make_config(changes)
    train(config, quiet)
    plain, other = outcome(tmp_path / "plain"), outcome(Path(config.out))
    assert all(torch.equal(tensor, plain.model[name]) for name, tensor in other.model.items())
    assert all(torch.equal(tensor, plain.optimizer[name]) for name, tensor in other.optimizer.items())
    for left, right in zip(plain.metrics, other.metrics, strict=True):
        both = left.keys() & right.keys()
        compared = both if "train.evaluate_tokens" not in changes else both - {"val_loss"}
        assert {name: left[name] for name in compared} == {name: right[name] for name in compared}


def test_no_random_state_is_read_or_changed(
    make_config: MakeConfig, quiet: Console, outcome: Callable[[Path], Outcome], assert_same_bits: Same, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    train(make_config(out=tmp_path / "one"), quiet)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    train(make_config(out=tmp_path / "two"), quiet)
    assert_same_bits(outcome(tmp_path / "one"), outcome(tmp_path / "two"))


def test_each_evaluation_reads_the_same_windows(
    make_config: MakeConfig, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Any]] = []
    original = vars(sources)["held_out_batches"]

    def watched(*args: Any, **kwargs: Any) -> Any:
        batches = list(original(*args, **kwargs))
        seen.append([batch.tokens.tolist() for batch in batches])
        return iter(batches)

    monkeypatch.setattr(sources, "held_out_batches", watched)
    train(make_config({"train.steps": 4, "train.evaluate_every": 1}), quiet)
    assert len(seen) == 4
    assert all(each == seen[0] for each in seen)
    assert sum(map(len, seen[0])) == 4


def _batches(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    read: list[list[list[int]]] = []
    original = BatchStream.batch

    def batch(self: BatchStream, *args: Any) -> Any:
        made = original(self, *args)
        read.append(made.tokens.tolist())
        return made

    monkeypatch.setattr(BatchStream, "batch", batch)
    return read


def test_a_seed_drives_initialisation_and_order_and_all_shapes_see_the_same_batches(
    make_config: MakeConfig, quiet: Console, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read = _batches(monkeypatch)
    uniform = {"family": "uniform", "layers": 2, "width": 16, "heads": 2}
    runs: dict[str, dict[str, Any]] = {
        "explicit": {},
        "uniform": {"shape": uniform},
        "two passes less": {"train.micro_batch": 4},
        "seed 1": {"train.seed": 1},
    }
    for name, changes in runs.items():
        train(make_config({**changes, "train.steps": 6}, out=tmp_path / name), quiet)
    explicit, other_shape, other_cut, other_seed = (read[at : at + 6] for at in range(0, 24, 6))
    assert explicit == other_shape == other_cut
    assert sorted(chain.from_iterable(explicit[:5])) == sorted(chain.from_iterable(other_seed[:5])), (
        "an epoch holds every window once"
    )
    assert explicit[0] != other_seed[0]
    first = RunFolder(tmp_path / "explicit").read_metrics()[0]["train_loss"]
    assert RunFolder(tmp_path / "seed 1").read_metrics()[0]["train_loss"] != first


# --- what is refused --------------------------------------------------------------------------------------------------


def test_other_data_is_refused_and_nothing_is_written(
    make_config: MakeConfig, quiet: Console, small_data: Path, other_data: Path
) -> None:
    config = make_config({"train.steps": 4})
    train(config, quiet)
    before = _files(Path(config.out))
    fingerprints = [TokenData.open(path).fingerprint for path in (small_data, other_data)]
    with pytest.raises(EntasisError, match=f"step 4 was trained on other data .*{fingerprints[0]}.*{fingerprints[1]}"):
        train(make_config({"train.steps": 8, "data.path": str(other_data)}), quiet)
    assert _files(Path(config.out)) == before


def test_the_same_data_elsewhere_is_the_same_data(
    make_config: MakeConfig, console: Console, small_data: Path, tmp_path: Path
) -> None:
    train(make_config({"train.steps": 3}), console)
    (tmp_path / "moved").symlink_to(small_data)
    train(make_config({"data.path": str(tmp_path / "moved")}), console)
    assert "changed since the run began: data.path:" in _said(console)


def test_a_changed_setting_is_refused_and_nothing_is_written(make_config: MakeConfig, quiet: Console) -> None:
    config = make_config({"train.steps": 3})
    train(config, quiet)
    before = _files(Path(config.out))
    with pytest.raises(ConfigError, match=r"^optimizer\.learning_rate: .* begun with 0\.003, and now it is 0\.01"):
        train(make_config({"optimizer.learning_rate": 0.01}), quiet)
    assert _files(Path(config.out)) == before


def test_an_edited_checkpoint_of_equal_tensors_is_refused(make_config: MakeConfig, quiet: Console) -> None:
    """Configuration and shape.json edited alike, so that only the checkpoint knows."""
    config = make_config({"train.steps": 3})
    train(config, quiet)
    layers = config.model_dump()["shape"]["layers"]
    layers[2] |= {"heads": 3, "kv_heads": 3, "head_dim": 8}
    edited = make_config({"shape.layers": layers})
    folder = RunFolder(Path(config.out))
    folder.write(edited, edited.design(257).shape, folder.read_environment())
    with pytest.raises(EntasisError, match="step 3 has another shape: layer 3"):
        train(edited, quiet)


def test_a_context_longer_than_the_data_is_refused_before_any_step(make_config: MakeConfig, quiet: Console) -> None:
    with pytest.raises(ConfigError, match=r"^model\.context: 1024 is too long"):
        train(make_config({"model.context": 1024, "train.batch_tokens": 4096}), quiet)


def test_a_context_longer_than_the_held_out_split_is_refused_before_any_step(
    make_config: MakeConfig, quiet: Console
) -> None:
    config = make_config({"model.context": 160, "train.batch_tokens": 320, "train.micro_batch": 1, "train.steps": 2})
    with pytest.raises(ConfigError, match=r"^model\.context: 160 is too long .*held-out"):
        train(config, quiet)
    assert RunFolder(Path(config.out)).read_metrics() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"data.path": "nowhere"},
        {"data.vocab_size": 50},
        {"model.context": 1024, "train.batch_tokens": 4096},
        {"train.skip_bad_steps": 1, "optimizer.learning_rate": 1e38, "schedule.warmup_steps": 0},
    ],
    ids=["no data", "other data", "too long", "fails in its steps"],
)
def test_a_start_that_is_refused_leaves_no_folder(
    changes: dict[str, Any], make_config: MakeConfig, quiet: Console, tmp_path: Path
) -> None:
    config = make_config(changes, out=tmp_path / "runs" / "a")
    with pytest.raises(EntasisError):
        train(config, quiet)
    assert (tmp_path / "runs").exists() == ("optimizer.learning_rate" in changes), "what was trained is kept"


# --- what stops a run -------------------------------------------------------------------------------------------------


def _break_loss(monkeypatch: pytest.MonkeyPatch, call: int, factor: float) -> None:
    original = SpreadModel.loss_of_pass
    calls = 0

    def broken(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        loss, routings = original(*args)
        return (loss * factor if calls == call else loss), routings

    monkeypatch.setattr(SpreadModel, "loss_of_pass", broken)


def _updates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The rates of the updates that are made."""
    rates: list[float] = []
    original = Optimizer.step

    def step(self: Optimizer, learning_rate: float) -> None:
        rates.append(learning_rate)
        original(self, learning_rate)

    monkeypatch.setattr(Optimizer, "step", step)
    return rates


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
@pytest.mark.parametrize("call", [9, 10], ids=["first pass of step 5", "second pass of step 5"])
def test_a_loss_that_is_not_finite_stops_before_the_update(
    call: int,
    factor: float,
    make_config: MakeConfig,
    quiet: Console,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Same,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    config = make_config()
    with monkeypatch.context() as patch:
        _break_loss(patch, call, factor)
        updates = _updates(patch)
        with pytest.raises(NonFiniteError) as caught:
            train(config, quiet)
    assert len(updates) == 4, "the update was made"
    line = str(caught.value)
    assert line.startswith("step 5: loss ")
    assert "\n" not in line
    for part in ("after 256 tokens", "epoch 0.800, windows ", ".npy at token ", "optimizer.learning_rate"):
        assert part in line
    assert outcome(Path(config.out)).step == 3, "the last good checkpoint is kept"
    assert [record["step"] for record in RunFolder(Path(config.out)).read_metrics()] == [1, 2, 3, 4]
    train(config, quiet)
    train(make_config(out=tmp_path / "whole"), quiet)
    assert_same_bits(outcome(Path(config.out)), outcome(tmp_path / "whole"))


def test_a_gradient_that_is_not_finite_stops_before_the_update(
    make_config: MakeConfig, quiet: Console, outcome: Callable[[Path], Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is fine, one gradient is not."""
    config = make_config()
    original = SpreadModel.loss_of_pass
    calls = 0

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan")

    def broken(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        loss, routings = original(*args)
        if calls == 8:
            loss.register_hook(spoil)  # type: ignore[no-untyped-call]
        return loss, routings

    monkeypatch.setattr(SpreadModel, "loss_of_pass", broken)
    updates = _updates(monkeypatch)
    with pytest.raises(NonFiniteError, match=r"^step 4: loss \d\.\d+, gradient norm nan"):
        train(config, quiet)
    assert len(updates) == 3, "the update was made"
    saved = outcome(Path(config.out))
    assert saved.step == 3
    assert all(torch.isfinite(tensor).all() for tensor in saved.model.values())


@pytest.mark.parametrize("rate", [1e38, 3e38, 1e25])
@pytest.mark.parametrize("checkpoint_every", [1, 3, 100])
def test_a_rate_far_too_high_is_told_and_no_broken_weight_is_saved(
    checkpoint_every: int, rate: float, make_config: MakeConfig, quiet: Console
) -> None:
    """Whether the loss, the held-out loss or a weight shows it first."""
    config = make_config(
        {
            "optimizer.learning_rate": rate,
            "optimizer.weight_decay": 0.0,
            "schedule": {"name": "constant", "warmup_steps": 0},
            "train.checkpoint_every": checkpoint_every,
        }
    )
    with pytest.raises(NonFiniteError, match=r"^step \d+: "):
        train(config, quiet)
    checkpoint = load_newest(Path(config.out) / "checkpoints", pytest.fail)
    assert checkpoint is None or all(torch.isfinite(tensor).all() for tensor in checkpoint.model.values())


def test_a_held_out_loss_that_is_not_finite_stops_before_the_checkpoint(
    make_config: MakeConfig, quiet: Console, outcome: Callable[[Path], Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "held_out_loss", lambda *_, **__: float("nan"))
    config = make_config({"train.evaluate_every": 6})
    with pytest.raises(NonFiniteError, match=r"^step 6: held-out loss nan"):
        train(config, quiet)
    assert outcome(Path(config.out)).step == 3


def test_a_full_disk_at_a_checkpoint_keeps_the_older_one(
    make_config: MakeConfig,
    quiet: Console,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Same,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    config = make_config()

    def full(descriptor: int) -> None:
        if (Path(config.out) / "checkpoints" / "step-00000003").exists():
            raise OSError(28, os.strerror(28))
        original(descriptor)

    original = os.fsync
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises((EntasisError, OSError), match="No space left on device"):
            train(config, quiet)
    assert outcome(Path(config.out)).step == 3
    train(config, quiet)
    train(make_config(out=tmp_path / "whole"), quiet)
    assert_same_bits(outcome(Path(config.out)), outcome(tmp_path / "whole"))


def test_a_second_process_is_refused(make_config: MakeConfig, quiet: Console) -> None:
    config = make_config()
    with RunFolder(Path(config.out)).locked(), pytest.raises(EntasisError, match=f"process {os.getpid()} is working"):
        train(config, quiet)


def _signal_at_step(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals, times: int = 1) -> None:
    """Each signal only when the handler of the one before it has run, since the kernel may make one of two."""
    original = vars(loop)["learning_rate"]

    def share(config: RunConfig, at: int) -> Any:
        if at == step:
            for _ in range(times):
                handler = signal.getsignal(signal.SIGINT)  # any first signal gives Ctrl-C its usual effect back
                os.kill(os.getpid(), number)
                until = time.monotonic() + 10
                while signal.getsignal(signal.SIGINT) is handler:
                    assert time.monotonic() < until, f"{number.name} did not arrive"
                    time.sleep(0.001)
        return original(config, at)

    monkeypatch.setattr(loop, "learning_rate", share)


def test_a_signal_in_the_last_step_is_not_lost(
    make_config: MakeConfig, quiet: Console, outcome: Callable[[Path], Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is finished, and whatever called it has to stop."""
    config = make_config({"train.steps": 4})
    _signal_at_step(monkeypatch, 3, signal.SIGTERM)
    with pytest.raises(Interrupted, match="stopped by SIGTERM: step 4 of 4 is saved"):
        train(config, quiet)
    finished = outcome(Path(config.out))
    assert finished.step == 4
    assert "val_loss" in finished.metrics[-1]


def test_a_second_ctrl_c_does_not_wait_for_the_step(
    make_config: MakeConfig, quiet: Console, outcome: Callable[[Path], Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    _signal_at_step(monkeypatch, 4, signal.SIGINT, times=2)
    with pytest.raises(KeyboardInterrupt):
        train(config, quiet)
    assert outcome(Path(config.out)).step == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_stop_request_outside_the_main_thread_does_nothing() -> None:
    import threading

    handlers: list[Any] = []

    def enter() -> None:
        with StopRequest() as stop:
            handlers.append((signal.getsignal(signal.SIGINT), stop.name))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [(before, None)]
