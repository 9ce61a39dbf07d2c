"""Token files of other programs, written here from the descriptions of their formats."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entasis.data.check_foreign import check_foreign
from entasis.data.dataset import TokenSource
from entasis.data.foreign import open_foreign
from entasis.data.stream import IGNORED, BatchStream, held_out_batches
from entasis.data.token_split import TokenSplit
from entasis.errors import ConfigError, EntasisError

EOS = 50256
VOCAB = 50257


def write_nanogpt(path: Path, ids: Sequence[int]) -> Path:
    """nanoGPT's `prepare.py`: a uint16 array written with `tofile`."""
    np.array(ids, dtype=np.uint16).tofile(path)
    return path


def write_llmc(path: Path, ids: Sequence[int], magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> Path:
    """llm.c's and modded-nanogpt's: 256 int32 (magic number, version, number of tokens, zeros), then the tokens."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(ids)
    path.write_bytes(header.tobytes() + np.array(ids, dtype).tobytes())
    return path


def write_megatron(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], code: int = 8, dtype: str = "<u2", modes: bool = False
) -> Path:
    """Megatron's pair: documents of sequences of tokens."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    itemsize = np.dtype(dtype).itemsize
    pointers = np.concatenate([[0], np.cumsum(lengths)])[:-1] * itemsize
    indices = np.concatenate([[0], np.cumsum([len(document) for document in documents])])
    prefix.with_suffix(".bin").write_bytes(b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences))
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", code)
        + struct.pack("<Q", len(sequences))
        + struct.pack("<Q", len(indices))
        + np.array(lengths, "<i4").tobytes()
        + np.array(pointers, "<i8").tobytes()
        + np.array(indices, "<i8").tobytes()
        + (bytes(len(sequences)) if modes else b"")
    )
    return prefix


def tokens(split: Any) -> list[int]:
    assert isinstance(split, TokenSplit)
    return [int(token) for token in split.read(0, split.tokens)]


def starts(split: Any) -> list[int]:
    assert isinstance(split, TokenSplit)
    return [int(start) for start in split.document_starts(0, split.tokens)]


def open_pair(kind: Any, train: Path, held_out: Path | float | None = None, **settings: Any) -> TokenSource:
    other = str(held_out) if isinstance(held_out, Path) else held_out
    return open_foreign(kind, str(train), **{"vocab_size": VOCAB, "held_out": other, **settings})


def test_nanogpt_files_are_read_as_they_are(tmp_path: Path) -> None:
    ids = [5, 50256, 7, 0, 65_000 % VOCAB, 9]
    data = open_pair("nanogpt", write_nanogpt(tmp_path / "train.bin", ids), write_nanogpt(tmp_path / "val.bin", [1, 2]))
    assert (tokens(data.train), tokens(data.held_out)) == (ids, [1, 2])
    assert (data.vocab_size, data.eos_id, data.name) == (VOCAB, None, "train.bin")
    assert data.tokenizer() is None
    assert (data.tokenizer_name, data.bytes_per_token, data.unigram_bits_per_byte) == (None, None, None)


@pytest.mark.parametrize(
    ("magic", "version", "dtype", "largest"), [(20240520, 1, "<u2", 65_535), (20240801, 7, "<u4", 128_255)]
)
def test_llmc_files_are_read_as_they_are(tmp_path: Path, magic: int, version: int, dtype: str, largest: int) -> None:
    ids = [largest, 3, 0]
    train = write_llmc(tmp_path / "a_train_000001.bin", ids, magic, version, dtype)
    held_out = write_llmc(tmp_path / "a_val_000000.bin", [4], magic, version, dtype)
    data = open_pair("llmc", train, held_out, vocab_size=largest + 1)
    assert (tokens(data.train), tokens(data.held_out)) == (ids, [4])


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4"), (5, "<i8"), (1, "<u1")])
@pytest.mark.parametrize("named", ["text_document", "text_document.bin", "text_document.idx"])
def test_megatron_pairs_are_read_with_their_documents(tmp_path: Path, code: int, dtype: str, named: str) -> None:
    documents = [[[1, 2, 3], [4, 9]], [[5, 9]], [], [[], [6, 7, 9]], [[8, 9]]]
    write_megatron(tmp_path / "text_document", documents, code, dtype, modes=code == 4)
    data = open_pair("megatron", tmp_path / named, held_out=None, vocab_size=10, eos_id=9)
    assert tokens(data.train) + tokens(data.held_out) == [1, 2, 3, 4, 9, 5, 9, 6, 7, 9, 8, 9]
    assert starts(data.train) == [0, 5, 7, 10]
    split = data.train
    assert isinstance(split, TokenSplit)
    assert [split.document_starts(low, low + 2).tolist() for low in (0, 4, 6, 8)] == [[0], [5], [7], []]


def test_a_glob_names_several_files_in_order(tmp_path: Path) -> None:
    for number, ids in ((2, [5, 6]), (1, [1, 2, 3]), (3, [7])):
        write_llmc(tmp_path / f"train_{number}.bin", ids)
        write_megatron(tmp_path / f"m{number}", [[ids]])
    data = open_pair("llmc", tmp_path / "train_*.bin", write_llmc(tmp_path / "val.bin", [9]))
    assert tokens(data.train) == [1, 2, 3, 5, 6, 7]
    several = open_pair("megatron", tmp_path / "m*", held_out=None)
    assert tokens(several.train) + tokens(several.held_out) == [1, 2, 3, 5, 6, 7]
    assert starts(several.train) + [several.train.tokens + start for start in starts(several.held_out)] == [0, 3, 5]


def test_without_held_out_files_the_tail_is_held_out(tmp_path: Path) -> None:
    path = write_nanogpt(tmp_path / "all.bin", range(1000))
    for share, cut in ((None, 990), (0.25, 750)):
        data = open_foreign("nanogpt", str(path), vocab_size=VOCAB, held_out=share)
        assert (tokens(data.train), tokens(data.held_out)) == (list(range(cut)), list(range(cut, 1000)))
        assert data.request["held_out"] == [f"the last {1000 - cut} tokens"]
        assert isinstance(data.held_out, TokenSplit)
        assert data.held_out.where(3) == f"{path} at token {cut + 3}"
    with pytest.raises(ConfigError, match=r"data\.held_out: a share of 0\.01 leaves nothing"):
        open_foreign("nanogpt", str(write_nanogpt(tmp_path / "one.bin", [1])), vocab_size=VOCAB)


def test_the_tail_begins_with_a_document_where_documents_are_known(tmp_path: Path) -> None:
    write_megatron(tmp_path / "m", [[[1] * 60], [[2] * 25], [[3] * 15]])
    data = open_foreign("megatron", str(tmp_path / "m"), vocab_size=10, held_out=0.3)
    assert (data.train.tokens, starts(data.held_out)) == (85, [0])


@pytest.mark.parametrize(("kind", "expected"), [("nanogpt", [0, 3, 6]), ("llmc", [0, 2, 5])])
def test_documents_are_found_by_the_id_between_them(tmp_path: Path, kind: str, expected: list[int]) -> None:
    """nanoGPT's scripts close documents with the id, llm.c's open them with it."""
    ids = [4, 4, EOS, 5, 5, EOS, 6, 6]
    path = {"nanogpt": write_nanogpt, "llmc": write_llmc}[kind](tmp_path / "a.bin", ids)
    other = {"nanogpt": write_nanogpt, "llmc": write_llmc}[kind](tmp_path / "b.bin", ids)
    data = open_pair(kind, path, other, eos_id=EOS)
    assert starts(data.train) == expected
    stream = BatchStream(data.train, context=7, batch_sequences=1, seed=0, eos_id=EOS, document_mask=True)
    batch = stream.batch(0)
    assert batch.documents is not None
    inside = [start for start in expected if start]
    assert batch.documents[0].tolist() == [sum(start <= place for start in inside) for place in range(7)]
    assert [place for place in range(7) if batch.targets[0, place] == IGNORED] == [start - 1 for start in inside]
    assert (
        len(
            list(
                held_out_batches(data.held_out, context=3, batch_sequences=2, tokens=6, document_mask=True, eos_id=EOS)
            )
        )
        == 1
    )


def test_without_that_id_documents_are_not_known(tmp_path: Path) -> None:
    data = open_pair("nanogpt", write_nanogpt(tmp_path / "a.bin", range(40)), held_out=None)
    with pytest.raises(ConfigError, match=r"data\.document_mask: .* does not say where documents start"):
        BatchStream(data.train, context=7, batch_sequences=1, seed=0, eos_id=None, document_mask=True).batch(0)


def test_ids_outside_the_vocabulary_are_errors(tmp_path: Path) -> None:
    path = write_nanogpt(tmp_path / "a.bin", [*range(20), VOCAB, *range(20)])
    data = open_pair("nanogpt", path, held_out=None)
    with pytest.raises(EntasisError, match=rf"a\.bin: token 20 is {VOCAB}, outside the vocabulary of {VOCAB}"):
        tokens(data.train)
    write_megatron(tmp_path / "m", [[[1, 2, -1, 3]]], code=4, dtype="<i4")
    with pytest.raises(EntasisError, match=r"m\.bin: token 2 is -1, outside the vocabulary"):
        tokens(open_pair("megatron", tmp_path / "m", held_out=None).train)


@pytest.mark.parametrize("kind", ["nanogpt", "llmc", "megatron"])
def test_a_vocabulary_that_the_type_cannot_hold_is_refused(tmp_path: Path, kind: str) -> None:
    """Larger ids would have been cut off in writing, and nothing in the file would show it."""
    write_nanogpt(tmp_path / "nanogpt.bin", range(9))
    write_llmc(tmp_path / "llmc.bin", range(9))
    write_megatron(tmp_path / "megatron", [[range(9)]])
    open_pair(kind, tmp_path / f"{kind}.bin", held_out=None, vocab_size=65_536)
    with pytest.raises(ConfigError, match=r"data\.vocab_size: .*\.bin holds uint16, which cannot hold .* 65537"):
        open_pair(kind, tmp_path / f"{kind}.bin", held_out=None, vocab_size=65_537)


def break_files(folder: Path) -> list[tuple[str, Path, str]]:
    """Damaged files: their format, and what must be said."""
    small = write_megatron(folder / "short", [[[1, 2, 3]], [[4]]])
    index = small.with_suffix(".idx").read_bytes()
    cases: list[tuple[str, Path, str]] = [("nanogpt", folder / "odd.bin", "3 bytes are no row of 16-bit tokens")]
    (folder / "odd.bin").write_bytes(b"abc")
    cases += [("nanogpt", write_llmc(folder / "header.bin", range(9)), "set data.format=llmc")]
    cases += [("llmc", write_nanogpt(folder / "plain.bin", range(9)), "instead of the magic number and version")]
    cut = write_llmc(folder / "cut.bin", range(9))
    os.truncate(cut, 1024 + 17)
    cases += [("llmc", cut, "its header promises 9 tokens, which end at byte 1042")]

    def variant(name: str, bin_bytes: bytes, idx_bytes: bytes | None, said: str) -> None:
        (folder / f"{name}.bin").write_bytes(bin_bytes)
        if idx_bytes is not None:
            (folder / f"{name}.idx").write_bytes(idx_bytes)
        cases.append(("megatron", folder / f"{name}.bin", said))

    variant("alone", b"\0\0", None, "a .bin needs its .idx beside it")
    variant("short-bin", b"\0" * 6, index, "its last sequence ends at byte 8")
    variant("long-bin", b"\0" * 10, index, "its last sequence ends at byte 8")
    variant("cut-index", b"\0" * 8, index[:-1], "its header promises 2 sequences and 3 document entries")
    variant("tiny-index", b"\0" * 8, index[:20], "too few for Megatron's index")
    variant("magic", b"\0" * 8, b"X" + index[1:], "begins with")
    variant("floats", b"\0" * 8, index[:17] + b"\x07" + index[18:], "type 7 is none of tokens")
    return cases


def test_damaged_files_end_in_one_line_and_in_a_finding(tmp_path: Path) -> None:
    for kind, path, said in break_files(tmp_path):
        with pytest.raises(EntasisError) as caught:
            open_pair(kind, path, held_out=None)
        assert said in str(caught.value) and path.stem in str(caught.value) and "\n" not in str(caught.value)
        (finding,) = check_foreign(kind, str(path), VOCAB)  # type: ignore[arg-type]
        assert said in finding.line


def test_missing_files_and_doubled_ones_are_refused(tmp_path: Path) -> None:
    path = write_nanogpt(tmp_path / "a.bin", range(40))
    with pytest.raises(ConfigError, match=r"data\.path: .*nowhere\*: no such file"):
        open_pair("nanogpt", tmp_path / "nowhere*", held_out=None)
    with pytest.raises(ConfigError, match=r"data\.held_out: .*nowhere: no such file"):
        open_pair("nanogpt", path, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"data\.held_out: .*a\.bin is also in data\.path"):
        open_pair("nanogpt", path, path)


def test_the_fingerprint_follows_content_and_settings_and_not_the_place(tmp_path: Path) -> None:
    path = write_nanogpt(tmp_path / "a.bin", range(400))
    original = open_pair("nanogpt", path, held_out=None).fingerprint
    moved = write_nanogpt(tmp_path / "b.bin", range(400))
    assert open_pair("nanogpt", moved, held_out=None).fingerprint == original
    for settings in ({"held_out": 0.5}, {"vocab_size": 50_000}, {"eos_id": 7}):
        assert open_pair("nanogpt", path, **settings).fingerprint != original
    write_nanogpt(path, [*range(399), 7])
    assert open_pair("nanogpt", path, held_out=None).fingerprint != original
    write_megatron(tmp_path / "m", [[[1, 2], [3, 4]], [[5, 6]]])
    before = open_pair("megatron", tmp_path / "m", held_out=0.1).fingerprint
    write_megatron(tmp_path / "m", [[[1, 2]], [[3, 4], [5, 6]]])
    assert open_pair("megatron", tmp_path / "m", held_out=0.1).fingerprint != before, "the index counts too"


def test_check_lists_everything_in_every_file(tmp_path: Path) -> None:
    write_nanogpt(tmp_path / "a1.bin", [1, 60_000, 2, 60_001])
    write_nanogpt(tmp_path / "a2.bin", [1, 2])
    (tmp_path / "a3.bin").write_bytes(b"x")
    first, last = check_foreign("nanogpt", str(tmp_path / "a*.bin"), VOCAB)
    assert (first.file.name, first.offset, first.byte) == ("a1.bin", 1, 2)
    assert "token 1 is 60000" in first.line and "2 such ids" in first.line
    assert last.file.name == "a3.bin"
    assert not list(check_foreign("nanogpt", str(tmp_path / "a2.bin"), None))


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (34 + 4, struct.pack("<i", 3), "sequence 2 of 2 tokens lies at byte 10 instead of 12"),
        (34 + 12 + 8, struct.pack("<q", 4), "sequence 1 of 2 tokens lies at byte 4 instead of 6"),
        (34 + 36, struct.pack("<q", 1), "document entry 0 is 1"),
        (34 + 36 + 8, struct.pack("<q", 9), "document entry 1 is 9"),
        (34 + 36 + 16, struct.pack("<q", 2), "document entry 2 is 2"),
    ],
)
def test_check_finds_a_broken_index(tmp_path: Path, place: int, value: bytes, said: str) -> None:
    prefix = write_megatron(tmp_path / "m", [[[1, 2, 9]], [[3, 9], [4, 9]]])
    assert not list(check_foreign("megatron", str(prefix), 10, 9))
    index = bytearray(prefix.with_suffix(".idx").read_bytes())
    index[place : place + len(value)] = value
    prefix.with_suffix(".idx").write_bytes(index)
    finding, *_ = check_foreign("megatron", str(prefix), 10)
    assert said in finding.line
    # A wrong length shows in the place of the next sequence.
    assert finding.byte == (34 + 12 + 16 if place == 34 + 4 else place)


def test_check_finds_documents_that_do_not_end(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "m", [[[1, 2, 9]], [[3, 5]], [[4, 9]]])
    (finding,) = check_foreign("megatron", str(prefix), 10, 9)
    assert "token 4 is 5 instead of the end token 9" in finding.line and finding.offset == 4
