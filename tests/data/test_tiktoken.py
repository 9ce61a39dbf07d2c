"""tiktoken's encodings: the same ids as tiktoken's own, the published layout of control tokens, and files offline."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import tiktoken
import tiktoken_ext.openai_public
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken._educational import bpe_train

from entasis.data.dataset import TokenData
from entasis.data.documents import Sources
from entasis.data.prepare import Preparation, find_prepared, prepare_data
from entasis.data.tiktoken_ranks import ENCODINGS, open_tiktoken
from entasis.data.tokenizers import load_tokenizer
from entasis.errors import ConfigError, EntasisError

NAMES = ("gpt2", "cl100k_base", "o200k_base")
TEXT = (
    "In the beginning the word was with the people, and they'll say they've heard it; we're HERE'S AND there's.\n\n"
    "  indented   lines\t\twith    runs of      blanks  \r\n 1234567 12 3.14159 and ½ ٣٤ numbers\n"
    * 3
    + "naïve café Ünïcode 日本語のテキスト 日本 한국어 🙂🙂👩‍👩‍👧 नमस्ते aaaaaaaaaaaaaa bababababa //////\n"
) * 2
PIECES = [
    "a",
    "aa",
    "ba",
    "the",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "'s",
    "'LL",
    "'ſ",
    "1",
    "23",
    "٣",
    "½",
    ".",
    "/",
    "日本",
    "é",
    "e\u0301",
]
PIECES += [
    "नमस्ते",
    "🙂",
    "\u00a0",
    "\u3000",
    "ǅ",
    "ʰ",
    "İ",
    "ß",
    "\x00",
    "<|endoftext|>",
    "<|eos|>",
    "<|",
    "\ufffd",
    "ABC",
    "Ab",
]

Ranks = dict[bytes, int]


def theirs(name: str, ranks: Ranks) -> tiktoken.Encoding:
    """tiktoken's own encoding of a name, with other ranks."""
    with pytest.MonkeyPatch.context() as patch:
        for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
            patch.setattr(tiktoken_ext.openai_public, loader, lambda *_, **__: ranks)
        settings_of_name = tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS[name]()
    return tiktoken.Encoding(name, pat_str=settings_of_name["pat_str"], mergeable_ranks=ranks, special_tokens={})


@lru_cache
def trained(name: str) -> Ranks:
    ranks: Ranks = bpe_train(TEXT, 400, theirs(name, one_each())._pat_str.replace("$", r"\Z"), visualise=None)
    return ranks


def one_each() -> Ranks:
    return {bytes([byte]): byte for byte in range(256)}


def shuffled(name: str) -> Ranks:
    """Ranks that no training gives: parts may rank after their whole, and some tokens cannot be joined at all."""
    tokens = [*trained(name), b"unreachable", b"xyz", b" xy"]
    order = [*range(256), *random.Random(5).sample(range(256, len(tokens)), len(tokens) - 256)]
    return dict(zip(tokens, order, strict=True))


def write(folder: Path, name: str, ranks: Ranks) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / f"{name}.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items()))
    return path


@pytest.mark.parametrize("make", [trained, shuffled], ids=["trained", "shuffled"])
@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_tiktoken(tmp_path: Path, name: str, make: Callable[[str], Ranks]) -> None:
    ranks = make(name)
    ours, reference = open_tiktoken(f"tiktoken:{write(tmp_path, name, ranks)}"), theirs(name, ranks)
    assert len(reference.encode_ordinary(TEXT)) < 0.8 * len(TEXT.encode())  # merges are at work

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=30).map("".join))
    def agree(text: str) -> None:
        ids = ours.encode_batch([text])[0]
        assert ids == reference.encode_ordinary(text)
        assert ours.decode(ids) == text

    agree()
    for text in (
        TEXT,
        "unreachable xyz xy xyzxyz",
        "a \n  ",
        "a\n\n ",
        "x  ",
        " \r\n\r\n",
        "<|endoftext|>",
        "".join(PIECES),
    ):
        assert ours.encode_batch([text])[0] == reference.encode_ordinary(text)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_control_tokens_are_tiktokens(name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
            patch.setattr(tiktoken_ext.openai_public, loader, lambda *_, **__: {})
        special = tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS[name]()["special_tokens"]
    in_order = sorted(special, key=special.__getitem__)
    ours = ENCODINGS[name].special
    assert list(ours[: len(in_order)]) == in_order
    assert set(ours[len(in_order) :]) == ({"<|eos|>", "<|pad|>"} if name == "cl100k_base" else set())


@pytest.mark.parametrize(
    ("name", "size", "eos", "vocabulary"),
    [
        ("gpt2", 50_256, 50_256, 50_257),
        ("cl100k_base", 100_256, 100_261, 100_263),
        ("o200k_base", 199_998, 199_998, 200_000),
    ],
)
def test_layout_at_full_size(tmp_path: Path, name: str, size: int, eos: int, vocabulary: int) -> None:
    ranks = one_each() | {b"%06d" % i: i for i in range(256, size)}  # as many as are published, though other ones
    tokenizer = open_tiktoken(f"tiktoken:{write(tmp_path, name, ranks)}")
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (eos, vocabulary)
    rows = tokenizer.encode_batch(["<|endoftext|><|eos|><|pad|><|fim_prefix|>"])
    assert max(rows[0]) < size  # what is written is text
    assert tokenizer.decode([*rows[0], eos]) == "<|endoftext|><|eos|><|pad|><|fim_prefix|>"


def test_prepared_data_keeps_the_tokenizer_whole(tmp_path: Path) -> None:
    ranks = trained("cl100k_base")
    file = write(tmp_path / "ranks", "cl100k_base", ranks)
    (tmp_path / "a.txt").write_text("\n\n".join(f"They've {i} <|endoftext|> words" for i in range(50)))
    preparation = Preparation(Sources.find((str(tmp_path / "a.txt"),)), tokenizer=f"tiktoken:{file.parent}")
    data = prepare_data(preparation, tmp_path / "data")
    assert find_prepared(preparation, tmp_path / "data") is not None
    file.unlink()  # nothing outside the folder is needed from here on
    data = TokenData.open(tmp_path / "data")
    data.verify()
    assert data.manifest.tokenizer.name == "tiktoken:cl100k_base (not the published ranks)"
    assert (data.vocab_size, data.eos_id) == (len(ranks) + 7, len(ranks) + 5)
    assert data.manifest.special_tokens_in_text == {"<|endoftext|>": 50}
    data.tokenizer().save(tmp_path / "copy")  # as a run keeps it
    copy = load_tokenizer(tmp_path / "copy")
    assert copy.encode_batch([TEXT])[0] == theirs("cl100k_base", ranks).encode_ordinary(TEXT)


def test_an_offline_folder_serves_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "gpt2", trained("gpt2"))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    named = open_tiktoken("tiktoken:gpt2")
    assert named.fingerprint == open_tiktoken(f"tiktoken:{tmp_path}").fingerprint
    assert named.eos_token == "<|endoftext|>"


def test_a_name_takes_the_ranks_that_tiktoken_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", lambda *_, **__: trained("o200k_base"))
    named = open_tiktoken("tiktoken:o200k_base")
    assert named.name == "tiktoken:o200k_base"
    assert named.encode_batch([TEXT])[0] == theirs("o200k_base", trained("o200k_base")).encode_ordinary(TEXT)


@pytest.mark.parametrize("name", NAMES)
def test_without_network_and_cache_a_name_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for variable in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # refused at once
    with pytest.raises(EntasisError, match=rf"tiktoken:{name}: fetching its ranks needs the network once") as caught:
        open_tiktoken(f"tiktoken:{name}")
    assert f"a folder that holds {name}.tiktoken" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rank_files_that_cannot_be_used(tmp_path: Path) -> None:
    good = write(tmp_path / "two", "gpt2", one_each())
    write(tmp_path / "two", "cl100k_base", one_each())
    (tmp_path / "none").mkdir()
    bad = tmp_path / "r50k_base.tiktoken"
    for given_, message in (
        ("cl200k", "expected tiktoken: and gpt2, r50k_base, cl100k_base, o200k_base, or a file or folder"),
        (f"{tmp_path}/mine.tiktoken", "expected tiktoken: and gpt2"),
        (f"{tmp_path}/two/gpt2", "expected tiktoken: and gpt2"),
        ("", "several|no rank file|expected"),
        (f"{tmp_path}/two", r"holds several rank files \(gpt2\.tiktoken, cl100k_base\.tiktoken\); name a file"),
        (f"{tmp_path}/none", "holds no rank file"),
        (f"{tmp_path}/none/gpt2.tiktoken", r"gpt2\.tiktoken: cannot be read \(No such file"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            open_tiktoken(f"tiktoken:{given_}")
        assert "\n" not in str(caught.value)
    lines = good.read_bytes().splitlines(keepends=True)
    for content, message in (
        (b"{}", "line 1 is no token with its rank"),
        (b"$$$ 0\n", "not a rank file"),
        (b"".join(lines[:100]), "byte 100 has no rank"),
        (b"".join(lines[5:]), "the ranks of 251 tokens are not 0 to 250"),
        (b"".join(lines) + lines[0], "line 257 names a token for the second time"),
        (b"", "byte 0 has no rank"),
    ):
        bad.write_bytes(content)
        with pytest.raises(ConfigError, match=message) as caught:
            open_tiktoken(f"tiktoken:{bad}")
        assert str(bad) in str(caught.value)


def test_the_end_token_is_not_chosen_for_tiktoken() -> None:
    with pytest.raises(ConfigError, match="--eos: only for a tokenizer file"):
        Preparation(Sources(()), tokenizer="tiktoken:gpt2", eos="<|endoftext|>")
