"""`entasis prepare`, called as the command line calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from entasis.cli.prepare import _DEFAULT_SHARD_TOKENS, prepare
from entasis.data.dataset import TokenData
from entasis.data.prepare import DEFAULT_SHARD_TOKENS
from entasis.errors import EntasisError

app = typer.Typer()
app.command()(prepare)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(f"Paragraph {number} <|endoftext|> and more words." for number in range(40)))
    return file


def refusal(result: Result) -> str:
    assert isinstance(result.exception, EntasisError)
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_prepares_and_says_what_it_did(text: Path, tmp_path: Path) -> None:
    result = run(text, "--out", tmp_path / "out", "--tokenizer", "bpe:4096", "--held-out", "0.1", "--processes", "1")
    assert result.exit_code == 0, result.output
    data = TokenData.open(tmp_path / "out")
    data.verify()
    assert "40 documents" in result.output
    assert "MB/s" in result.output
    assert "<|endoftext|> stood in the text 40 times; it was encoded as ordinary text" in result.output
    assert f"the text gave only {data.vocab_size:,} of 4,096 tokens" in result.output


def test_if_missing_accepts_the_same_and_force_replaces(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(text, "--out", out).exit_code == 0
    written = (out / "manifest.json").stat().st_mtime_ns
    again = run(text, "--out", out, "--if-missing")
    assert again.exit_code == 0
    assert "holds this data already" in again.output
    assert (out / "manifest.json").stat().st_mtime_ns == written
    assert "holds this data already; --if-missing accepts it" in refusal(run(text, "--out", out))
    assert "holds other data" in refusal(run(text, "--out", out, "--if-missing", "--held-out", "0.2"))
    assert "holds other data" in refusal(run(text, "--out", out, "--held-out", "0.2"))
    assert run(text, "--out", out, "--held-out", "0.2", "--force").exit_code == 0
    assert TokenData.open(out).manifest.request["held_out"] == 0.2


def test_only_the_first_documents_are_taken(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(text, "--out", out, "--documents", "7")
    assert "7 documents," in result.output
    assert "holds other data (documents: 7, now None)" in refusal(run(text, "--out", out, "--if-missing"))
    assert run(text, "--out", out, "--documents", "7", "--if-missing").exit_code == 0


def test_damaged_data_is_not_taken_for_complete(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(text, "--out", out)
    (out / "train-00000.npy").unlink()
    assert "train-00000.npy" in refusal(run(text, "--out", out, "--if-missing"))
    assert run(text, "--out", out, "--force").exit_code == 0


def test_a_single_document_says_that_its_tail_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("one document of some length " * 20)
    result = run(tmp_path / "one.txt", "--out", tmp_path / "out")
    assert "1 document," in result.output
    assert "the tail of the only document" in result.output


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--processes", "0"], "--processes"),
        (["--held-out", "2"], "--held-out"),
        (["--tokenizer", "bpe:7"], "--tokenizer"),
        (["--tokenizer", "nowhere.json"], "--tokenizer"),
        (["--shard-tokens", "0"], "--shard-tokens"),
        (["--documents", "0"], "--documents"),
        (["--tokenizer", "tiktoken:cl99k"], "--tokenizer"),
    ],
)
def test_wrong_settings_name_the_option(text: Path, tmp_path: Path, arguments: list[str], field: str) -> None:
    result = run(text, "--out", tmp_path / "out", *arguments)
    assert refusal(result).startswith(f"{field}: ")
    assert isinstance(result.exception, EntasisError)
    assert result.exception.exit_status == 2
    assert not (tmp_path / "out").exists()


def test_the_default_is_the_one_of_the_library() -> None:
    assert _DEFAULT_SHARD_TOKENS == DEFAULT_SHARD_TOKENS
