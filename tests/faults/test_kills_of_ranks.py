"""Hundreds of kills of runs that two ranks train: one of them dies, or both; the other leaves, and nothing is lost."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from entasis.run import checkpoint
from entasis.run.config import RunConfig
from entasis.train.loop import train
from entasis.train.ranks import Ranks

MakeConfig = Callable[..., RunConfig]
Outcome = Any

_KILLS = {"rank 0, place": 24, "rank 1, place": 24, "rank 0, time": 18, "rank 1, time": 18, "both, time": 22}
"""Of each of the two kinds of run below: 212 in all. Both at once is a machine that is lost."""

_KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"parallel.strategy": "ddp"},
    "fsdp, bits of documents": {"parallel.strategy": "fsdp", "data.document_mask": True},
}

_EXCHANGES = ((Ranks, "summed"), (Ranks, "_largest"), (checkpoint, "write_parts"))
"""Places beside those of one rank: where ranks exchange numbers, agree, and write together."""

_DIED = f"exit code {-signal.SIGKILL}"
_WORDS = {
    0: ("rank 1 ended or did not answer in time", "the ranks did not find each other"),
    1: ("rank 0 or its machine is lost", "the ranks did not find each other"),
}
"""What a rank may say, and no more than that, when it has lost the other one."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", _KINDS)
def test_ranks_killed_more_than_two_hundred_times(
    kind: str,
    make_config: MakeConfig,
    quiet: Console,
    outcome: Callable[[Path], Outcome],
    assert_same_bits: Callable[[Outcome, Outcome], None],
    on_ranks: Callable[..., dict[int, str]],
    watch: Callable[..., list[str]],
    newest_step: Callable[[Path, Path, int], int],
    tmp_path: Path,
) -> None:
    changes = {
        "train.steps": 11,
        "train.batch_tokens": 8 * 16,  # two passes on each rank
        "train.checkpoint_every": 2,
        "train.evaluate_every": 3,
        "parallel.timeout_seconds": 15.0,  # for a rank that dies before it has met the other
        **_KINDS[kind],
    }
    note = tmp_path / "announced"

    def run(config: RunConfig, die_at: Mapping[int, int], kill_after: Mapping[int, float]) -> dict[int, str]:
        def work(rank: int) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("entasis.train.ranks._ROLL_CALL_SECONDS", 0.5)
                watch(patch, note, die_at.get(rank), _EXCHANGES)
                train(config, quiet)

        # A rank that is still there after a minute has waited longer than for any timeout: it hangs, and that fails.
        return on_ranks(2, work, kill_after=kill_after, seconds=60)

    whole = make_config(changes, out=tmp_path / "never stopped")
    started = time.monotonic()
    assert run(whole, {}, {}) == {}
    longest = time.monotonic() - started
    note.unlink()
    source = random.Random(sorted(_KINDS).index(kind))
    left = dict(_KILLS)
    runs, before = 0, 0
    config = make_config(changes, out=tmp_path / "run 0")
    while any(left.values()):
        how = source.choice([each for each, count in left.items() if count])
        who, _, what = how.partition(", ")
        ranks = (0, 1) if who == "both" else (int(who.removeprefix("rank ")),)
        if what == "place":
            said = run(config, dict.fromkeys(ranks, source.randint(1, 90)), {})
        else:
            said = run(config, {}, dict.fromkeys(ranks, source.uniform(0.01, 0.8) * longest))
        died = {rank for rank, line in said.items() if line == _DIED}
        assert died or not said, said
        for rank in said.keys() - died:
            assert said[rank].startswith("LostRankError: "), said
            assert any(words in said[rank] for words in _WORDS[rank]), said
        left[how] -= bool(died)
        before = newest_step(Path(config.out), note, before)
        if not said:
            assert_same_bits(outcome(Path(config.out)), outcome(Path(whole.out)))
            assert not [path.name for path in Path(config.out).rglob("*.tmp")], "leftovers"
            runs, before = runs + 1, 0
            note.unlink(missing_ok=True)
            config = make_config(changes, out=tmp_path / f"run {runs}")
    assert run(config, {}, {}) == {}
    assert_same_bits(outcome(Path(config.out)), outcome(Path(whole.out)))
    assert runs, "kills so close to each other that no run got on prove little"
