"""Preparing a folder: contents, boundaries of types, independence of processes, completeness."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from entasis.data.dataset import TokenData, TokenSplit
from entasis.data.documents import Sources
from entasis.data.manifest import read_manifest
from entasis.data.prepare import Preparation, find_prepared, prepare_data
from entasis.data.shards import SplitWriter, as_tokens, token_dtype
from entasis.data.tokenizers import BPE_EOS, FileTokenizer, load_tokenizer, train_bpe
from entasis.data.workplace import complete_or_absent
from entasis.errors import ConfigError, EntasisError

DOCUMENTS = [f"Document {number}: " + "some words of it " * (1 + number * 7 % 11) for number in range(60)]
Prepare = Callable[..., TokenData]


def documents_of(split: TokenSplit, data: TokenData) -> list[str]:
    starts = [*split.document_starts(0, split.tokens), split.tokens]
    return [data.tokenizer().decode(split.read(a, b).tolist()) for a, b in pairwise(starts)]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_every_document_is_there_once_and_closed(prepare: Prepare, tokenizer: str) -> None:
    data = prepare(tokenizer=tokenizer, held_out=0.2)
    train, held_out = documents_of(data.train, data), documents_of(data.held_out, data)
    assert sorted(train + held_out) == sorted(DOCUMENTS)
    assert 0 < len(held_out) < 30
    assert train == [text for text in DOCUMENTS if text in train]  # in their order
    for split, record in ((data.train, data.manifest.train), (data.held_out, data.manifest.held_out)):
        everything = split.read(0, split.tokens)
        ends = split.document_starts(1, split.tokens) - 1
        assert (np.flatnonzero(everything == data.eos_id) == [*ends, split.tokens - 1]).all()
        assert record.bytes == sum(len(text.encode()) for text in documents_of(split, data))
    data.verify()


def test_shards_are_plain_arrays_of_the_size_asked_for(prepare: Prepare) -> None:
    data = prepare()
    shards = [np.load(data.path / shard.file) for shard in data.manifest.train.shards]
    assert len(shards) > 3
    assert {len(shard) for shard in shards[:-1]} == {700}
    assert {shard.dtype for shard in shards} == {np.dtype("uint16")}
    assert (np.concatenate(shards) == data.train.read(0, data.train.tokens)).all()


def test_number_of_processes_and_of_shards_does_not_matter(prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entasis.data.encode.BATCH_BYTES", 500)  # many batches from little text

    one, three = (
        prepare(DOCUMENTS, "one", tokenizer="bpe:300"),
        prepare(DOCUMENTS, "three", processes=3, tokenizer="bpe:300"),
    )
    other = prepare(DOCUMENTS, "one.", tokenizer="bpe:300", shard_tokens=10_000_000)
    files = sorted(path.name for path in one.path.iterdir() if path.is_file() and path.name != "manifest.json")
    assert files == sorted(
        path.name for path in three.path.iterdir() if path.is_file() and path.name != "manifest.json"
    )
    assert all((one.path / file).read_bytes() == (three.path / file).read_bytes() for file in files)
    assert one.fingerprint == three.fingerprint == other.fingerprint
    assert prepare(DOCUMENTS, "two", tokenizer="bpe:300", held_out=0.3).fingerprint != one.fingerprint


def test_bpe_learns_from_training_text_only(prepare: Prepare) -> None:
    data = prepare(tokenizer="bpe:300", held_out=0.3)
    again = train_bpe(documents_of(data.train, data), 300)
    assert again.fingerprint == data.manifest.tokenizer.fingerprint
    assert train_bpe(DOCUMENTS, 300).fingerprint != again.fingerprint


def test_special_tokens_in_text_are_text_and_counted(prepare: Prepare) -> None:
    documents = [f"before {BPE_EOS} after {BPE_EOS} {number}" for number in range(10)]
    data = prepare(documents, tokenizer="bpe:300")
    assert data.manifest.special_tokens_in_text == {BPE_EOS: 20}
    assert sorted(documents_of(data.train, data) + documents_of(data.held_out, data)) == sorted(documents)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_535, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_type_follows_the_largest_possible_id(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    backend = Backend(models.WordLevel({"x": 0, "last": vocab_size - 1, "</s>": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("x last\n\nlast last")
    preparation = Preparation(Sources.find((str(tmp_path / "a.txt"),)), tokenizer=str(tmp_path / "tokenizer.json"))
    data = prepare_data(preparation, tmp_path / "out")
    assert token_dtype(vocab_size) == data.manifest.dtype == dtype
    assert np.load(data.path / "train-00000.npy").dtype == dtype
    found = [*data.train.read(0, data.train.tokens), *data.held_out.read(0, data.held_out.tokens)]
    assert sorted(found) == [0, 1, 1, *[vocab_size - 1] * 3]


@pytest.mark.parametrize("wrong", [65_536, 300, -1])
def test_ids_outside_the_vocabulary_are_not_written(tmp_path: Path, wrong: int) -> None:
    with pytest.raises(EntasisError, match=f"the id {wrong}, outside its vocabulary of 300"):
        as_tokens(np.array([1, wrong]), 300)
    writer = SplitWriter(tmp_path, "train", vocab_size=300, shard_tokens=10)
    with pytest.raises(EntasisError, match="outside its vocabulary"):
        writer.add(np.array([1, wrong]), np.array([2]), 5)
    writer.abandon()


def test_a_single_document_gives_its_tail_and_no_token_is_invented(prepare: Prepare) -> None:
    text = "There is one long document only. " * 50
    data = prepare([text], held_out=0.05)
    assert data.manifest.held_out_by == "tail"
    train, held_out = (split.read(0, split.tokens).tolist() for split in (data.train, data.held_out))
    assert bytes(train + held_out[:-1]).decode() == text
    assert held_out[-1] == data.eos_id
    assert data.eos_id not in train
    assert 0.03 < len(held_out) / len(text) < 0.2
    data.verify()


def test_unigram_bits_are_those_of_training_frequencies(prepare: Prepare) -> None:
    data = prepare(held_out=0.3)
    counts = Counter(data.train.read(0, data.train.tokens).tolist())
    total = data.train.tokens + data.vocab_size
    bits = sum(-math.log2((counts[i] + 1) / total) for i in data.held_out.read(0, data.held_out.tokens).tolist())
    assert data.manifest.unigram_bits_per_byte == pytest.approx(bits / data.manifest.held_out.bytes, rel=1e-12)


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in ("a", "", " \n", "b", "c")))
    data = prepare_data(Preparation(Sources.find((str(file),))), tmp_path / "out")
    assert data.manifest.empty_documents == 2
    assert data.manifest.train.documents.count + data.manifest.held_out.documents.count == 3


@pytest.mark.parametrize(
    ("text", "message"), [("", "holds no text"), (" \n\n", "holds no text"), ("x", "a single character")]
)
def test_text_that_is_too_short(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(EntasisError, match=message):
        prepare_data(Preparation(Sources.find((str(tmp_path / "a.txt"),))), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"held_out": 0.0}, "--held-out: expected a share between 0 and 1, got 0.0"),
        ({"held_out": 1.0}, "--held-out"),
        ({"held_out": float("nan")}, "--held-out"),
        ({"shard_tokens": 0}, "--shard-tokens: expected at least 512, got 0"),
        ({"shard_tokens": -(10**9)}, "--shard-tokens: expected at least 512, got -1000000000"),
        ({"shard_tokens": 511}, "--shard-tokens: expected at least 512, got 511"),
        ({"tokenizer": "bpe:3"}, "--tokenizer: bpe:3"),
        ({"tokenizer": "bytes", "eos": "x"}, "--eos: only for a tokenizer file"),
    ],
)
def test_settings_out_of_range(prepare: Prepare, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(**settings)


def test_same_request_is_found_and_another_is_refused(prepare: Prepare, tmp_path: Path) -> None:
    data = prepare()
    source = str(tmp_path / "data.txt")
    same = Preparation(Sources.find((source,)), shard_tokens=700)
    found = find_prepared(same, data.path)
    assert found is not None
    assert found.fingerprint == data.fingerprint
    for other in (
        Preparation(Sources.find((source,)), shard_tokens=701),
        Preparation(Sources.find((source,)), shard_tokens=700, tokenizer="bpe:300"),
        Preparation(Sources.find((source,), "other"), shard_tokens=700),
    ):
        with pytest.raises(ConfigError, match="holds other data"):
            find_prepared(other, data.path)
    (tmp_path / "data.txt").write_text("other text\n\nof another length")
    with pytest.raises(ConfigError, match="holds other data"):
        find_prepared(same, data.path)
    with pytest.raises(ConfigError, match="not an empty folder"):
        prepare_data(same, data.path)
    replaced = prepare_data(same, data.path, replace=True)
    assert replaced.fingerprint != data.fingerprint
    replaced.verify()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "data.txt"]


def test_folders_of_other_kinds_are_never_touched(prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    preparation = Preparation(Sources.find((str(tmp_path / "mine"),)))
    for replace in (False, True):
        with pytest.raises(ConfigError, match="not an empty folder"):
            prepare_data(preparation, tmp_path / "mine", replace=replace)
    with pytest.raises(ConfigError, match="holds other files"):
        find_prepared(preparation, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    assert find_prepared(preparation, tmp_path / "empty") is None
    assert prepare_data(preparation, tmp_path / "empty").train.tokens > 1


def test_a_failure_leaves_nothing(prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": "fine"}\nbroken')
    with pytest.raises(EntasisError, match="line 3"):
        prepare_data(Preparation(Sources.find((str(tmp_path / "a.jsonl"),))), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_two_processes_on_one_folder_are_told(tmp_path: Path) -> None:
    target = tmp_path / "out"
    second = complete_or_absent(target)
    with complete_or_absent(target), pytest.raises(EntasisError, match="another process is preparing this folder"):
        second.__enter__()
    assert target.is_dir()


_SLOW_PREPARATION = """
import sys, time
from itertools import pairwise
from pathlib import Path
from entasis.data.documents import Sources
from entasis.data.prepare import Preparation, prepare_data
if __name__ == "__main__":
    def progress(what, done, total):
        if what == "encoding":
            print("encoding", flush=True)
            time.sleep(0.05)
    preparation = Preparation(Sources.find((sys.argv[1],)))
    prepare_data(preparation, Path(sys.argv[2]), processes=int(sys.argv[3]), progress=progress)
"""


@pytest.mark.parametrize(("signal_number", "processes"), [(signal.SIGKILL, 2), (signal.SIGINT, 1)])
def test_killed_in_the_middle_it_leaves_no_folder_and_goes_well_again(
    tmp_path: Path, signal_number: signal.Signals, processes: int
) -> None:
    text, out, script = tmp_path / "a.txt", tmp_path / "out", tmp_path / "slow.py"
    text.write_text("\n\n".join("word " * 30_000 for _ in range(60)))
    script.write_text(_SLOW_PREPARATION)
    with subprocess.Popen(
        [sys.executable, str(script), str(text), str(out), str(processes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"encoding\n"
        process.send_signal(signal_number)
        process.wait(20)
        deadline = time.monotonic() + 20
        while _session_lives(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _session_lives(process.pid)  # worker processes go with their parent
    assert process.returncode != 0
    assert not out.exists()
    data = prepare_data(Preparation(Sources.find((str(text),))), out)
    data.verify()
    assert not list(tmp_path.glob(".out*"))


def _session_lives(session: int) -> bool:
    """Whether a process of the session is left that is no zombie."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            return True
    return False


def test_a_tokenizer_file_and_its_name_end_up_in_the_folder(prepare: Prepare, tmp_path: Path) -> None:
    train_bpe(DOCUMENTS, 280).save(tmp_path / "mine")
    data = prepare(tokenizer=str(tmp_path / "mine"))
    assert data.manifest.tokenizer.name == "mine"
    assert isinstance(load_tokenizer(data.path / "tokenizer"), FileTokenizer)
    assert data.tokenizer().vocab_size == data.vocab_size == 280


def test_the_folder_does_not_depend_on_place_or_time(prepare: Prepare, tmp_path: Path) -> None:
    data = prepare()
    text = (data.path / "manifest.json").read_text()
    assert str(tmp_path) not in text
    before = (data.path / "manifest.json").stat().st_mtime_ns
    again = prepare_data(
        Preparation(Sources.find((str(tmp_path / "data.txt"),)), shard_tokens=700), data.path, replace=True
    )
    assert (again.path / "manifest.json").read_text() == text
    assert (again.path / "manifest.json").stat().st_mtime_ns != before
    assert read_manifest(again.path) == data.manifest
