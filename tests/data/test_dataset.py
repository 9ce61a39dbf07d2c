"""Reading a prepared folder: windows, damage, memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entasis.data.dataset import TokenData
from entasis.data.flat import file_sha256
from entasis.data.manifest import Manifest
from entasis.data.npy import NpyFile
from entasis.errors import ConfigError, EntasisError

Prepare = Callable[..., TokenData]


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def overwrite(path: Path, token: int, value: int) -> None:
    array = np.load(path)
    array[token] = value
    np.save(path, array)


@pytest.mark.parametrize("context", [1, 7, 16, 700, 1500])
def test_windows_are_consecutive_and_cross_shards(prepare: Prepare, context: int) -> None:
    data = prepare()
    everything = np.concatenate([np.load(data.path / shard.file) for shard in data.manifest.train.shards])
    count = data.train.windows(context)
    assert count == (len(everything) - 1) // context
    for index in {0, 1, count // 2, count - 1} & set(range(count)):
        window = data.train.window(index, context)
        assert window.dtype == np.int64
        assert (window == everything[index * context : index * context + context + 1]).all()
    with pytest.raises(IndexError):
        data.train.window(count, context)


def test_n_windows_need_one_token_more(prepare: Prepare) -> None:
    split = prepare().train
    assert split.windows(split.tokens - 1) == 1
    assert split.windows(split.tokens) == 0


def test_too_long_a_context_is_one_clear_line(prepare: Prepare) -> None:
    held_out = prepare().held_out
    with pytest.raises(
        ConfigError, match=rf"model\.context: 9999 is too long .* has {held_out.tokens} tokens"
    ) as caught:
        held_out.require_window(9999)
    assert "\n" not in str(caught.value)


def test_ids_outside_the_vocabulary_name_file_and_offset(prepare: Prepare) -> None:
    data = prepare()
    overwrite(data.path / "train-00001.npy", 123, 257)
    for read in (lambda: data.train.read(700, 1400), data.verify):
        with pytest.raises(EntasisError, match=r"train-00001\.npy: token 123 is 257, outside the vocabulary of 257"):
            read()
    assert len(data.train.read(0, 700)) == 700


@pytest.mark.parametrize("file", ["train-00001.npy", "held-out-00000.npy", "train-documents.npy"])
def test_a_flipped_bit_is_found_by_verify(prepare: Prepare, file: str) -> None:
    data = prepare()
    path = data.path / file
    content = bytearray(path.read_bytes())
    content[140] ^= 1
    path.write_bytes(content)
    TokenData.open(data.path)  # opening does not read the tokens
    with pytest.raises(EntasisError, match=file):
        data.verify()


@pytest.mark.parametrize("file", ["train-00000.npy", "train-documents.npy"])
@pytest.mark.parametrize("keep", [0, 5, 60, 300])
def test_a_truncated_file_is_found_on_opening(prepare: Prepare, file: str, keep: int) -> None:
    folder = prepare().path
    os.truncate(folder / file, keep)
    with pytest.raises(EntasisError, match=file) as caught:
        TokenData.open(folder)
    assert "\n" not in str(caught.value)


def test_a_file_cut_after_opening_is_found_on_reading(prepare: Prepare) -> None:
    data = prepare()
    os.truncate(data.path / "train-00000.npy", 400)
    with pytest.raises(EntasisError, match=r"train-00000\.npy: ends before byte"):
        data.train.read(0, 700)
    (data.path / "train-00000.npy").unlink()
    with pytest.raises(EntasisError, match=r"train-00000\.npy: cannot be read"):
        data.train.read(0, 700)


def test_missing_and_foreign_files_are_named(prepare: Prepare) -> None:
    folder = prepare().path
    array = np.load(folder / "train-00000.npy")
    np.save(folder / "train-00000.npy", array.astype(np.uint32))
    with pytest.raises(
        EntasisError, match=r"train-00000\.npy: holds uint32 of shape \(700,\), the manifest says uint16"
    ):
        TokenData.open(folder)
    np.save(folder / "train-00000.npy", np.array([{}] * 700), allow_pickle=True)
    with pytest.raises(EntasisError, match=r"train-00000\.npy: holds object"):
        TokenData.open(folder)
    (folder / "train-00000.npy").unlink()
    with pytest.raises(EntasisError, match=r"train-00000\.npy: cannot be read \(No such file"):
        TokenData.open(folder)
    with pytest.raises(EntasisError, match=r"holds no prepared data .* run entasis prepare"):
        TokenData.open(folder / "nowhere")


@pytest.mark.parametrize("name", ["../train-00000.npy", "/etc/passwd", "a/b.npy", "..", "", "c:x.npy", "a\\b.npy"])
def test_file_names_cannot_leave_the_folder(prepare: Prepare, name: str) -> None:
    folder = prepare().path
    for edit in (
        lambda data: data["train"]["shards"][0].update(file=name),
        lambda data: data["held_out"]["documents"].update(file=name),
    ):
        edit_manifest(folder, edit)
        with pytest.raises(EntasisError, match="is not the plain name of a file in this folder"):
            TokenData.open(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data.update(version=2), "version: "),
        (lambda data: data.update(format="other"), "format: "),
        (lambda data: data.update(vocab_size="257"), "vocab_size: "),
        (lambda data: data.update(vocab_size=70_000), "vocab_size: 70000 does not fit"),
        (lambda data: data.update(eos_id=257), "vocab_size: 257 does not fit eos_id 257"),
        (lambda data: data.update(surprise=1), "surprise: "),
        (lambda data: data["train"].pop("bytes"), "train.bytes: "),
        (lambda data: data["train"].update(tokens=5), "train.tokens: 5, but its shards hold"),
        (lambda data: data["train"].update(bytes=5), "fingerprint: "),
    ],
)
def test_a_wrong_manifest_names_the_field(
    prepare: Prepare, edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    folder = prepare().path
    edit_manifest(folder, edit)
    with pytest.raises(EntasisError) as caught:
        TokenData.open(folder)
    assert f"manifest.json: {message}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_shards_in_another_order_are_found(prepare: Prepare) -> None:
    data = prepare()
    first, second = (data.path / f"train-0000{i}.npy" for i in (0, 1))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    with pytest.raises(EntasisError, match=r"train-00000\.npy: checksum"):
        data.verify()

    def trust_files(manifest: dict[str, Any]) -> None:
        for shard in manifest["train"]["shards"]:
            shard["sha256"] = file_sha256(data.path / shard["file"])

    edit_manifest(data.path, trust_files)
    with pytest.raises(EntasisError, match="not in the order"):
        TokenData.open(data.path).verify()


def test_document_starts_are_found_by_position(prepare: Prepare) -> None:
    split = prepare().train
    starts = np.load(split.folder / "train-documents.npy")
    for low, high in ((0, 1), (0, split.tokens), (1, 200), (int(starts[3]), int(starts[5])), (int(starts[3]) + 1, 900)):
        assert (split.document_starts(low, high) == starts[(starts >= low) & (starts < high)]).all()


def test_another_tokenizer_beside_the_tokens_is_refused(prepare: Prepare) -> None:
    data, other = prepare(tokenizer="bpe:300"), prepare(["x y z", "a b c", "q"], out="other", tokenizer="bpe:300")
    for file in (data.path / "tokenizer").iterdir():
        file.write_bytes((other.path / "tokenizer" / file.name).read_bytes())
    with pytest.raises(EntasisError, match="not the tokenizer that made these tokens"):
        data.tokenizer()


def test_memory_does_not_grow_with_the_file(prepare: Prepare, tmp_path: Path) -> None:
    tokens = 200_000_000  # 400 MB, sparse on the disk
    data = prepare(tokenizer="bytes", out="small")
    path = tmp_path / "big.npy"
    header = (data.path / "train-00000.npy").read_bytes()[:128]
    old = b"(700,), }"
    path.write_bytes(header.replace(old + b" " * 6, f"({tokens},), }}".encode()))
    os.truncate(path, 128 + 2 * tokens)
    file = NpyFile(path, "<u2", tokens)
    before = _resident_bytes()
    for start in range(0, tokens - 100_000, 100_000):
        file.read(start, start + 100_000)
    assert _resident_bytes() - before < 40e6


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_manifest_is_typed(prepare: Prepare) -> None:
    data = prepare()
    assert isinstance(data.manifest, Manifest)
    assert data.name == "data.txt"
    assert data.vocab_size == 257
    assert data.eos_id == 256
