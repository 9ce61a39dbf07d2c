"""Settings that people write: what YAML may hold, and that every fault is one line that says where."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from entasis.errors import ConfigError
from entasis.settings import check_arguments, nearest, one_line, parse_json, parse_yaml, read_yaml, shorten, to_yaml

# --- YAML -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-3", 0.003), ("3E-3", 0.003), ("1e5", 100_000.0), ("-2e-1", -0.2), ("+2e1", 20.0), (".5e2", 50.0),
        ("3.e2", 300.0), ("1.5e3", 1500.0), ("3.0e-3", 0.003), ("1_000e1", 10_000.0),
        ("3", 3), ("3.5", 3.5), ("e5", "e5"), ("1e", "1e"), ("1e5x", "1e5x"), ("'3e-3'", "3e-3"), ("1-2e3", "1-2e3"),
        ("2026-01-31", "2026-01-31"), ("2026-13-45", "2026-13-45"), ("2026-01-31 10:00:00", "2026-01-31 10:00:00"),
        ("~", None), ("", None), ("true", True), ("[1, [2, x]]", [1, [2, "x"]]), ("{a: {b: 1}}", {"a": {"b": 1}}),
    ],
)  # fmt: skip
def test_values(text: str, value: object) -> None:
    read = parse_yaml(text, "here")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch hacked']",
        "!!python/name:os.system",
        "a: !!python/tuple [1, 2]",
        "a: !mine 3",
        "a: !!binary aGk=",
        "a: !!set {x, y}",
        "a: !!int '3'",
        "a: !!timestamp x",
        "!!map x",
        "a: {!!str k: 1}",
    ],
)
def test_tags_are_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^run.yaml: line 1, column \d+: tag '.*' is not allowed"):
        parse_yaml(text, "run.yaml")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "place", "key"),
    [
        ("a: 1\nb: 2\na: 3", "line 3, column 1", "'a'"),
        ("a:\n  b: 1\n  b: 1", "line 3, column 3", "'b'"),
        ("{a: 1, a: 1}", "line 1, column 8", "'a'"),
        ("1: x\n1.0: y", "line 2, column 1", "1.0"),
        ("- a: 1\n- {b: 1, 'b': 2}", "line 2, column 10", "'b'"),
    ],
)
def test_repeated_keys_are_refused(text: str, place: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "run.yaml")
    assert str(caught.value) == f"run.yaml: {place}: {key} is given twice"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: 1\nb: [1, 2", "line 2, column 9"),
        ("a: 1\nb: c: d", "line 2, column 5"),
        ("a:\n\t- b", "line 2, column 1"),
        ("a: 'x", "line 1, column 6"),
        ("a: 1\n  b: 2", "line 2, column 4"),
        ("a: @x", "line 1, column 4"),
        ("a: 1\n--- \nb: 2", "line 2, column 1"),
        ("a: *nowhere", "line 1, column 4"),
        ("? [a]\n: b", "line 1, column 3"),
        ("a: 1\n<<: 3", "line 2, column 5"),
    ],
)
def test_broken_yaml_names_the_line(text: str, place: str) -> None:
    with pytest.raises(ConfigError, match=rf"^run.yaml: {place}: ") as caught:
        parse_yaml(text, "run.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["a: \0", "x: " + "9" * 5000, "a: \ud800"])
def test_other_faults_are_one_line_too(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^run.yaml: not YAML: ") as caught:
        parse_yaml(text, "run.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 20_000, "- " * 20_000 + "x"])
def test_deep_nesting_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^run.yaml: nested too deeply$"):
        parse_yaml(text, "run.yaml")


def bomb(of: str, levels: int = 12) -> str:
    """Each line ten times the one before."""
    lines = [f"a0: &a0 {of}"]
    for level in range(1, levels):
        tenfold = ", ".join([f"*a{level - 1}"] * 10)
        value = f"[{tenfold}]" if of.startswith("[") else f"{{<<: [{tenfold}]}}"
        lines.append(f"a{level}: &a{level} {value}")
    return "\n".join(lines)


@pytest.mark.parametrize("of", ["[x, x, x, x, x, x, x, x, x, x]", "{k: x}"], ids=["lists", "merges"])
def test_alias_bombs_are_refused_at_once(of: str) -> None:
    started = time.process_time()
    with pytest.raises(ConfigError, match=r"^run.yaml: line \d+, column \d+: more than 1,000,000 values, aliases"):
        parse_yaml(bomb(of), "run.yaml")
    assert time.process_time() - started < 5


@pytest.mark.parametrize("text", ["&a [*a]", "a: &a {b: *a}", "a: &a\n  <<: *a"])
def test_aliases_to_themselves_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"'a' holds itself"):
        parse_yaml(text, "run.yaml")


def test_plain_aliases_and_merges_work() -> None:
    text = "a: &a {x: 1, y: 2}\nb: *a\nc: {<<: *a, y: 3}\nd: &d [1]\ne: [*d, *d]"
    assert parse_yaml(text, "run.yaml") == {
        "a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 2}, "c": {"x": 1, "y": 3}, "d": [1], "e": [[1], [1]],
    }  # fmt: skip


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc_ :#"), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(st.text("abc-_0123456789e.", min_size=1), PLAIN | st.text("0123456789eE.+-_:"), max_size=6))
def test_what_is_written_is_read_back(data: dict[str, Any]) -> None:
    assert parse_yaml(to_yaml(data), "here") == data


@settings(deadline=None)
@given(st.text())
def test_no_text_ends_in_anything_but_data_or_one_line(text: str) -> None:
    for parse in (parse_yaml, parse_json):
        try:
            parse(text, "here")
        except ConfigError as error:
            assert str(error).startswith("here: ")
            assert "\n" not in str(error)


# --- JSON -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", r"^a.json: line 1, column 1: expecting value$"),
        ('{"a": 1,\n}', r"^a.json: line \d, column \d: "),
        ('{"a": 1, "a": 2}', r"^a.json: 'a' is given twice$"),
        ("[" * 100_000, r"^a.json: nested too deeply$"),
        ("9" * 5000, r"^a.json: not JSON: Exceeds the limit"),
    ],
)
def test_broken_json_is_one_line(text: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        parse_json(text, "a.json")


# --- files ------------------------------------------------------------------------------------------------------------


def test_files_are_read_by_their_ending(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: 3e-3\n")
    (tmp_path / "a.json").write_text(json.dumps({"a": [1]}, indent="\t"))
    (tmp_path / "marked.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    (tmp_path / "marked.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_yaml(tmp_path / "a.yaml") == {"a": 0.003}
    assert read_yaml(tmp_path / "a.json") == {"a": [1]}
    assert read_yaml(tmp_path / "marked.yaml") == read_yaml(tmp_path / "marked.json") == {"a": 1}


@pytest.mark.parametrize("content", ["", "- a\n", "hello", "3: x\n", "null"])
def test_files_hold_named_values(content: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert str(caught.value) == f"{path}: expected settings as `name: value` lines"


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml: no such file or directory$"):
        read_yaml(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match=r": is a directory$"):
        read_yaml(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("a: ö".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin.yaml: not UTF-8 text \(byte 3\)$"):
        read_yaml(tmp_path / "latin.yaml")


# --- arguments --------------------------------------------------------------------------------------------------------


def column(  # type: ignore[no-untyped-def]
    *,
    height: float,
    drums: int | Sequence[int],
    order: Literal["doric", "ionic"] = "doric",
    parts: Sequence[Mapping[str, Any]] = (),
    free=None,  # noqa: ANN001
) -> None:
    """Something with settings."""


KNOWN = ("height", "drums", "order", "parts", "free")


def test_arguments_that_fit() -> None:
    given_ = {"height": 3, "drums": [1, 2], "order": "ionic", "parts": [{"a": 1}], "free": object()}
    assert check_arguments(column, given_, known=KNOWN, owner="a column") == given_
    assert check_arguments(column, {"height": 3.5, "drums": 4}, known=KNOWN, owner="a column") == {
        "height": 3.5,
        "drums": 4,
    }


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"heigth": 3}, r"^heigth: a column has no such setting \(did you mean 'height'\?\); it takes height, drums"),
        ({"zzz": 3}, r"^zzz: a column has no such setting; it takes height, drums, order, parts, free$"),
        ({"height": "3"}, r"^height: expected a valid number; got '3'$"),
        ({"height": True}, r"^height: expected a valid number; got True$"),
        ({"height": None}, r"^height: expected a valid number; got None$"),
        ({"drums": 2.0}, r"^drums: expected .*; got 2.0$"),
        ({"drums": "12"}, r"^drums: expected .*; got '12'$"),
        ({"drums": True}, r"^drums: expected .*; got True$"),
        ({"drums": [1, "x"]}, r"^drums.1: expected a whole number; got 'x'$"),
        ({"order": "corinthian"}, r"^order: expected 'doric' or 'ionic'; got 'corinthian'$"),
        ({"parts": {"a": 1}}, r"^parts: expected a list; got \{'a': 1\}$"),
        ({"parts": [3]}, r"^parts.0: expected .*; got 3$"),
    ],
)
def test_arguments_that_do_not(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as caught:
        check_arguments(column, {"height": 3.0, "drums": 4} | changes, known=KNOWN, owner="a column")
    assert "\n" not in str(caught.value)


def test_missing_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^drums: missing; a column needs it$"):
        check_arguments(column, {"height": 3.0}, known=KNOWN, owner="a column")


class Section(BaseModel):
    rate: float
    sizes: list[int] | int = 3


class Whole(BaseModel):
    section: Section


@pytest.mark.parametrize(
    ("data", "prefix", "line"),
    [
        ({}, "", "section: missing"),
        ({"section": {}}, "", "section.rate: missing"),
        ({"section": {}}, "root", "root.section.rate: missing"),
        ({"section": {"rate": 1, "sizes": [1, "x"]}}, "", "section.sizes.1: expected a whole number"),
        ({"section": {"rate": []}}, "", "section.rate: expected a valid number; got []"),
    ],
)
def test_pydantic_reports_become_one_line(data: dict[str, Any], prefix: str, line: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Whole.model_validate(data)
    assert one_line(caught.value, prefix).startswith(line)


def test_lines_stay_short_whatever_was_given() -> None:
    monster: Any = "x" * 1000
    for _ in range(4):
        monster = [monster] * 9
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(int).validate_python(monster)
    assert len(one_line(caught.value, "layers")) < 300
    assert len(shorten("x" * 10_000)) < 100
    assert len(shorten(list(range(10_000)))) < 100
    assert shorten([1, "a"]) == "[1, 'a']"


def test_nearest() -> None:
    assert nearest("widht", ["width", "heads"]) == " (did you mean 'width'?)"
    assert nearest("qqq", ["width", "heads"]) == ""
