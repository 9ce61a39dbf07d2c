"""Hundreds of kills: wherever a run dies, it ends with the bits of the undisturbed one, and no checkpoint is lost."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from entasis.run.config import RunConfig
from entasis.train.loop import train

MakeConfig = Callable[..., RunConfig]
Outcome = Any

_KILLS_AT_PLACES, _KILLS_BY_TIME = 36, 16
"""Of each of the four kinds of run below: 208 in all."""

_KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "muon, bits of documents": {"optimizer.name": "muon", "data.document_mask": True},
    "encoder": {"model.causal": False, "train.mask_share": 0.4},
    "epochs that end inside a step": {"train.batch_tokens": 96, "train.micro_batch": 2, "model.style": "gpt2"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", _KINDS)
def test_killed_more_than_two_hundred_times(
    kind: str,
    make_config: MakeConfig,
    quiet: Console,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Callable[[Outcome, Outcome], None],
    in_child: Callable[..., int],
    watch: Callable[..., list[str]],
    newest_step: Callable[[Path, Path, int], int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    changes = {"train.steps": 11, "train.checkpoint_every": 2, "train.evaluate_every": 3, **_KINDS[kind]}
    note = tmp_path / "announced"
    whole = make_config(changes, out=tmp_path / "never stopped")
    train(whole, quiet)
    started = time.monotonic()
    assert in_child(lambda: train(make_config(changes, out=tmp_path / "timed"), quiet)) == 0
    longest = time.monotonic() - started
    source = random.Random(sorted(_KINDS).index(kind))
    left = {"place": _KILLS_AT_PLACES, "time": _KILLS_BY_TIME}
    runs, finished = 0, 0
    config = make_config(changes, out=tmp_path / "run 0")
    before = 0
    while any(left.values()):
        how = source.choice([each for each, count in left.items() if count])
        with monkeypatch.context() as patch:
            watch(patch, note, source.randint(1, 60) if how == "place" else None)
            kill_after = source.uniform(0.01, 0.6) * longest if how == "time" else None
            code = in_child(lambda c=config: train(c, quiet), kill_after=kill_after)
        assert code in (0, -signal.SIGKILL)
        left[how] -= code != 0
        before = newest_step(Path(config.out), note, before)
        if code == 0:
            assert_same_bits(outcome(Path(config.out)), outcome(Path(whole.out)))
            assert not [path.name for path in Path(config.out).rglob("*.tmp")], "leftovers"
            finished += 1
            runs, before = runs + 1, 0
            note.unlink(missing_ok=True)
            config = make_config(changes, out=tmp_path / f"run {runs}")
    train(config, quiet)
    assert_same_bits(outcome(Path(config.out)), outcome(Path(whole.out)))
    assert finished, "kills so close to each other that no run got on prove little"


@pytest.mark.slow
def test_killed_at_every_place(
    make_config: MakeConfig,
    quiet: Console,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Callable[[Outcome, Outcome], None],
    in_child: Callable[..., int],
    watch: Callable[..., list[str]],
    newest_step: Callable[[Path, Path, int], int],
    tmp_path: Path,
) -> None:
    """Each single place of a short run in turn: passes, evaluations, each file of each save, each removal."""
    changes = {"train.steps": 6, "train.evaluate_every": 3, "train.checkpoint_every": 2, "train.keep_checkpoints": 1}
    train(make_config(changes, out=tmp_path / "never stopped"), quiet)
    note = tmp_path / "announced"
    with pytest.MonkeyPatch.context() as patch:  # a second run: what libraries do at their first use is not counted
        seen = watch(patch, note, None)
        train(make_config(changes, out=tmp_path / "counted"), quiet)
    system = {"fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "save_file"}
    own = {"loss_of_pass", "held_out_loss", "save_checkpoint", "append_metrics", "sync_metrics"}
    assert set(seen) == system | own, "a place that the run never reaches proves nothing"
    for place in range(1, len(seen) + 1):
        note.unlink(missing_ok=True)
        config = make_config(changes, out=tmp_path / f"killed at {place}")
        with pytest.MonkeyPatch.context() as patch:
            watch(patch, note, place)
            assert in_child(lambda c=config: train(c, quiet)) == -signal.SIGKILL
        newest_step(Path(config.out), note, 0)
        train(config, quiet)
        assert_same_bits(outcome(Path(config.out)), outcome(tmp_path / "never stopped"))
