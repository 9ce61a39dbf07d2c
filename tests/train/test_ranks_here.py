"""A process's place among others, from the environment that torchrun gives it."""

from __future__ import annotations

import pytest
import torch

from entasis.errors import ConfigError
from entasis.run.sections import ParallelSection
from entasis.train.ranks import ranks_here

_CPU = torch.device("cpu")
_HERE: dict[str, str | None] = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def _set(monkeypatch: pytest.MonkeyPatch, values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


def test_the_place_that_torchrun_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, _HERE)
    ranks = ranks_here(ParallelSection(), _CPU)
    assert (ranks.rank, ranks.size, ranks.local, ranks.grouped, ranks.first) == (1, 2, 1, True, False)


def test_alone_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, dict.fromkeys(_HERE))
    ranks = ranks_here(ParallelSection(), _CPU)
    assert (ranks.rank, ranks.size, ranks.grouped, ranks.first) == (0, 1, False, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": None}, "RANK is missing in the environment, beside WORLD_SIZE 2; start with torchrun"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is missing in the environment, beside WORLD_SIZE 2"),
        ({"MASTER_PORT": None}, "MASTER_PORT is missing in the environment"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT abc in the environment is no port"),
        ({"RANK": "2"}, "RANK 2 in the environment is not below WORLD_SIZE 2"),
        ({"RANK": "one"}, "RANK, WORLD_SIZE and LOCAL_RANK in the environment are numbers"),
    ],
)
def test_a_place_that_is_none(changes: dict[str, str | None], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, _HERE | changes)
    with pytest.raises(ConfigError, match=message):
        ranks_here(ParallelSection(), _CPU)
