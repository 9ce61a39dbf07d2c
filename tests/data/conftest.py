"""Small prepared folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from entasis.data.dataset import TokenData
from entasis.data.documents import Sources
from entasis.data.prepare import Preparation, prepare_data

Prepare = Callable[..., TokenData]

DOCUMENTS = [f"Document {number}: " + "some words of it " * (1 + number * 7 % 11) for number in range(60)]


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    """Prepare documents (default: `DOCUMENTS`, bytes, shards of 700 tokens) in a new folder."""

    def make(documents: list[str] = DOCUMENTS, out: str = "data", processes: int = 1, **settings: object) -> TokenData:
        text = tmp_path / f"{out}.txt"
        text.write_text("\n\n".join(documents), encoding="utf-8")
        preparation = Preparation(Sources.find((str(text),)), **{"shard_tokens": 700, **settings})  # type: ignore[arg-type]
        return prepare_data(preparation, tmp_path / out, processes=processes)

    return make
