"""Hugging Face datasets as sources: local folders stand for the hub, and what happens without network is tried."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from entasis.data.dataset import TokenData
from entasis.data.documents import Sources
from entasis.data.hub import DATASETS, HubDataset, find_dataset
from entasis.data.manifest import read_manifest
from entasis.data.prepare import Preparation, find_prepared, prepare_data
from entasis.errors import ConfigError, EntasisError

DOCUMENTS = [f"Document {number} of some length\n\nwith 日本 and a blank line" for number in range(40)]


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset of two files in the folder own/er, which the library takes for the dataset of that name."""
    folder = tmp_path / "own" / "er"
    folder.mkdir(parents=True)
    for part in (0, 1):
        rows = (json.dumps({"id": i, "text": text}) for i, text in enumerate(DOCUMENTS[part * 20 : part * 20 + 20]))
        (folder / f"train-{part}.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    (folder / "test.jsonl").write_text(json.dumps({"id": 0, "text": "of the test split"}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return folder


def test_rows_come_in_the_order_of_the_dataset(local: Path) -> None:
    assert list(Sources.find(("hf:own/er",)).documents()) == DOCUMENTS
    assert list(Sources.find(("hf:own/er",), limit=25).documents()) == DOCUMENTS[:25]
    assert list(Sources.find(("hf:own/er:default:test",)).documents()) == ["of the test split"]
    assert list(Sources.find(("hf:own/er::test",)).documents()) == ["of the test split"]


@pytest.mark.parametrize(
    ("source", "text_field", "message"),
    [
        (
            "hf:own/er",
            "body",
            r"own/er, document 1: no field 'body' \(it has: id, text\); choose one with --text-field",
        ),
        ("hf:own/er", "id", "own/er, document 1: field 'id' holds int, not text"),
        ("hf:own/er:missing", "text", "own/er:missing: own/er cannot be used .*missing"),
        ("hf:own/er::missing", "text", "own/er::missing: own/er cannot be used .*missing"),
    ],
)
def test_what_a_dataset_lacks_is_named(local: Path, source: str, text_field: str, message: str) -> None:
    with pytest.raises(EntasisError, match=message) as caught:
        list(Sources.find((source,), text_field).documents())
    assert "\n" not in str(caught.value)


def test_forms_of_a_dataset() -> None:
    assert find_dataset("hf:a/b") == HubDataset("", "a/b", None, "train", None)
    assert find_dataset("hf:a/b:c:d@e/f") == HubDataset("", "a/b", "c", "d", "e/f")
    assert find_dataset("hf:a/b-1.c@main") == HubDataset("", "a/b-1.c", revision="main")
    assert find_dataset("web-bible") is None
    for wrong in ("hf:", "hf:a", "hf:a/b/c", "hf:a/b:c:d:e", "hf:a/b@", "hf:a b/c"):
        with pytest.raises(ConfigError, match=r"expected hf:OWNER/NAME\[:CONFIG\[:SPLIT\]\]\[@REVISION\]"):
            find_dataset(wrong)
    with pytest.raises(ConfigError, match="given twice"):
        Sources.find(("fineweb", "hf:HuggingFaceFW/fineweb:sample-10BT"))


def test_named_datasets_are_those_of_the_papers() -> None:
    sources = Sources.find(("fineweb", "dclm"), limit=7)
    assert sources.name == "fineweb + dclm"
    assert sources.streamed
    assert sources.identity() == [  # without asking the network
        {"dataset": "HuggingFaceFW/fineweb", "config": "sample-10BT", "split": "train"},
        {"dataset": "Zyphra/dclm-dedup", "split": "train"},
    ]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_a_streamed_source_gives_the_folder_of_its_text_and_is_read_once(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    times = []
    original = HubDataset.documents

    def counted(self: HubDataset, text_field: str) -> Iterator[str]:
        times.append(self.name)
        return original(self, text_field)

    monkeypatch.setattr(HubDataset, "documents", counted)
    monkeypatch.setitem(DATASETS, "fineweb", HubDataset("fineweb", str(local)))
    preparation = Preparation(Sources.find(("fineweb",), limit=30), tokenizer)
    data = prepare_data(preparation, tmp_path / "out")
    data.verify()
    assert times == ["fineweb"]
    assert not list(data.path.rglob("*.zst"))
    assert data.name == "fineweb"
    assert data.manifest.request["documents"] == 30
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in DOCUMENTS[:30]))
    same = prepare_data(Preparation(Sources.find((str(tmp_path / "text.jsonl"),)), tokenizer), tmp_path / "same")
    assert data.fingerprint == same.fingerprint
    assert find_prepared(preparation, tmp_path / "out") is not None
    with pytest.raises(ConfigError, match=r"holds other data \(documents: 30, now 40\)"):
        find_prepared(Preparation(Sources.find(("fineweb",), limit=40), tokenizer), tmp_path / "out")


def test_a_mixture_keeps_the_order_and_the_field(local: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"body": "mine"}\n')
    for file in local.glob("train*"):
        file.unlink()
    (local / "train.jsonl").write_text('{"body": "theirs"}\n')
    (local / "test.jsonl").unlink()
    (tmp_path / "last.txt").write_text("last")
    sources = Sources.find(("own.jsonl", "hf:own/er", "last.txt"), "body")
    data = prepare_data(Preparation(sources), tmp_path / "out")
    assert sorted(side.documents.count for side in (data.manifest.train, data.manifest.held_out)) == [1, 2]
    found = {data.tokenizer().decode(split.read(0, split.tokens).tolist()) for split in (data.train, data.held_out)}
    assert found in ({"minetheirs", "last"}, {"minelast", "theirs"}, {"theirslast", "mine"})


def test_a_stream_that_breaks_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(*_: object, **__: object) -> Iterator[dict[str, str]]:
        yield from ({"text": text} for text in DOCUMENTS[:10])
        raise ConnectionResetError("Connection reset by peer")

    monkeypatch.setattr("datasets.load_dataset", breaking)
    with pytest.raises(
        EntasisError, match=r"fineweb: this source needs the network .* after 10 documents .Connection reset"
    ):
        prepare_data(Preparation(Sources.find(("fineweb",))), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EntasisError, match=r"fineweb: needs the package datasets; run: pip install 'entasis\[hub\]'"):
        list(Sources.find(("fineweb",)).documents())


@pytest.mark.parametrize("source", ["fineweb", "hf:owner/of-nothing"])
def test_without_network_one_line_says_that_it_is_needed(tmp_path: Path, source: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-m", "entasis", "prepare", source, "--documents", "5", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1
    assert f"{source.removeprefix('hf:')}: this source needs the network to stream" in done.stderr
    assert not (tmp_path / "out").exists()


def test_data_prepared_from_the_network_is_accepted_without_it(local: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare_data(Preparation(Sources.find(("hf:own/er",))), out)
    for file in local.iterdir():
        file.unlink()
    assert find_prepared(Preparation(Sources.find(("hf:own/er",))), out) is not None
    assert TokenData.open(out).name == read_manifest(out).name == "own/er"
