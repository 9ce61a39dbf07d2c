"""Tokenizers: round trips, the end of a document, and control tokens that text cannot write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from entasis.data.tokenizers import (
    BPE_EOS,
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    bpe_vocab_size,
    load_tokenizer,
    open_tokenizer_file,
    train_bpe,
)
from entasis.errors import ConfigError, EntasisError

TEXTS = ["plain words, plain words", "naïve 日本 🙂\n\ttabs", f"a {BPE_EOS} b"]


def bpe() -> FileTokenizer:
    return train_bpe(TEXTS * 5, 280)


def word_level(*special: str) -> Backend:
    words = ["a", "b", "<", "/s>", "[UNK]", *special]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["[UNK]", *special])
    return backend


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), bpe()], ids=["bytes", "bpe"])
def test_texts_come_back_and_hold_no_control_token(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = tokenizer.encode_batch(TEXTS)
    assert [tokenizer.decode(row) for row in rows] == TEXTS
    assert all(0 <= i < tokenizer.vocab_size and i != tokenizer.eos_id for row in rows for i in row)
    assert tokenizer.decode([*rows[0], tokenizer.eos_id]) == TEXTS[0]
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.name, loaded.vocab_size, loaded.eos_id) == (tokenizer.name, tokenizer.vocab_size, tokenizer.eos_id)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.encode_batch(TEXTS) == rows


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), train_bpe(["ab"], 257)], ids=["bytes", "bpe"])
def test_broken_utf8_decodes_to_replacements(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode_batch(["a日b"])[0]
    broken = [whole[0], *whole[2:]]
    assert "�" in tokenizer.decode(broken)
    assert tokenizer.decode(broken).startswith("a")


def test_bpe_is_deterministic_and_counts_its_end_token() -> None:
    first, second = bpe(), bpe()
    assert first.fingerprint == second.fingerprint
    assert first.vocab_size == 280
    assert train_bpe(["ab ab"], 4096).vocab_size < 4096  # a small text gives fewer, and says its true size
    assert first.fingerprint != train_bpe(TEXTS * 5, 281).fingerprint


def test_special_tokens_in_text_are_counted_and_stay_text() -> None:
    tokenizer = bpe()
    assert tokenizer.count_special(f"{BPE_EOS} and {BPE_EOS}") == {BPE_EOS: 2}
    assert tokenizer.count_special("nothing") == {}


def test_a_model_that_knows_the_written_control_token_cannot_emit_it() -> None:
    # The word "</s>" is in this vocabulary, so that matching specials off alone does not help.
    tokenizer = FileTokenizer(word_level("</s>"), "words", "</s>")
    assert tokenizer.encode_batch(["a </s> b zz"]) == [[0, 2, 3, 1, 4]]  # "<" and "/s>"; unknown words stay unknown


def test_a_control_token_that_cannot_be_broken_is_refused() -> None:
    backend = word_level("a")  # a one-character control token
    with pytest.raises(EntasisError, match="cannot be written without the control token 'a'"):
        FileTokenizer(backend, "words", "a").encode_batch(["b a"])


def test_unigram_may_give_its_unknown_token() -> None:
    backend = Backend(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0)], 0, False))
    backend.add_special_tokens(["<unk>", "</s>"])
    assert FileTokenizer(backend, "unigram", "</s>").encode_batch(["aq"]) == [[2, 0]]


def test_truncation_padding_and_templates_of_a_file_are_off(tmp_path: Path) -> None:
    backend = word_level("</s>")
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 5)])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer_file(tmp_path).encode_batch(["a b a", "b"]) == [[0, 1, 0], [1]]


def test_vocabulary_with_holes_counts_to_its_largest_id() -> None:
    backend = Backend(models.WordLevel({"a": 0, "</s>": 70_000}, unk_token="a"))
    assert FileTokenizer(backend, "holes", "</s>").vocab_size == 70_001


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "special": True}])
def test_end_token_from_the_configuration(tmp_path: Path, eos: object) -> None:
    word_level("</s>", "<eos>").save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"--eos: .* several candidates \(</s>, <eos>\)"):
        open_tokenizer_file(tmp_path)
    assert open_tokenizer_file(tmp_path, "<eos>").eos_token == "<eos>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert open_tokenizer_file(tmp_path).eos_token == "</s>"
    assert open_tokenizer_file(tmp_path / "tokenizer.json").eos_token == "</s>"


def test_tokenizer_files_that_cannot_be_used(tmp_path: Path) -> None:
    word_level().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="no common name in the vocabulary; name it with --eos TOKEN"):
        open_tokenizer_file(tmp_path)
    with pytest.raises(ConfigError, match="'nope' is not in the vocabulary"):
        open_tokenizer_file(tmp_path, "nope")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer") as caught:
        open_tokenizer_file(tmp_path / "bad.json")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="expected bytes, bpe:N"):
        open_tokenizer_file(tmp_path / "missing")


@pytest.mark.parametrize("spec", ["bpe:", "bpe:x", "bpe:-5", "bpe:256", "bpe:²"])
def test_bpe_sizes_that_cannot_be(spec: str) -> None:
    with pytest.raises(ConfigError, match="expected bpe:N with N of at least 257"):
        bpe_vocab_size(spec)


def test_a_changed_tokenizer_is_not_loaded(tmp_path: Path) -> None:
    bpe().save(tmp_path)
    other = train_bpe(["other text"], 280)
    (tmp_path / "tokenizer.json").write_text(other._backend.to_str())
    with pytest.raises(EntasisError, match="not the one that was saved here"):
        load_tokenizer(tmp_path)
