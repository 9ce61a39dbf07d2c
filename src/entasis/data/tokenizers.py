"""Tokenizers: raw bytes, a byte-level BPE trained on the spot, a Hugging Face tokenizer file.

All of them turn text into ordinary tokens only. The one control token that is ever written, the end of a document, is
added by its id, so nothing that stands in a text can act as one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from entasis.errors import ConfigError, EntasisError

BPE_EOS = "<|endoftext|>"
_COMMON_EOS = (BPE_EOS, "<|end_of_text|>", "<|endofdocument|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
_DESCRIPTION = "entasis-tokenizer.json"
TOKENIZER_FILES = (_DESCRIPTION, "tokenizer.json", "tokenizer_config.json")
"""What `save` writes; of bytes, the first only."""
_SMALLEST_BPE = 257  # every byte, and the end of a document


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the package knows of a tokenizer."""

    @property
    def name(self) -> str:
        """How the user named it: `bytes`, `bpe:4096`, a file's name."""

    @property
    def vocab_size(self) -> int:
        """Largest possible id + 1."""

    @property
    def eos_id(self) -> int:
        """Id that closes a document."""

    @property
    def eos_token(self) -> str | None:
        """How that token is written, where it has a written form."""

    @property
    def fingerprint(self) -> str:
        """The same for two tokenizers exactly if they are the same (SHA-256, hexadecimal)."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without any control token."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; control tokens give no text, bytes that are not UTF-8 give U+FFFD."""

    def count_special(self, text: str) -> Counter[str]:
        """How often the written form of each control token occurs in a text."""

    def save(self, folder: Path) -> None:
        """Write everything that `load_tokenizer` needs into a folder (created if missing)."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document."""

    name = "bytes"
    vocab_size = 257
    eos_id = 256
    eos_token = None
    fingerprint = hashlib.sha256(b"entasis bytes 257").hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See `Tokenizer`."""
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return bytes(i for i in ids if i < self.eos_id).decode("utf-8", errors="replace")

    def count_special(self, text: str) -> Counter[str]:
        """See `Tokenizer`: the end of a document has no written form here."""
        return Counter()

    def save(self, folder: Path) -> None:
        """See `Tokenizer`."""
        _save_description(self, folder, kind="bytes")


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, with ordinary tokens only."""

    def __init__(self, backend: Backend, name: str, eos_token: str) -> None:
        """Take over `backend`, which nobody else may use afterwards.

        Raises:
            ConfigError: `eos_token` is not in the vocabulary.
        """
        backend.no_truncation()  # a tokenizer file may carry both, and both would change documents silently
        backend.no_padding()
        backend.encode_special_tokens = True
        eos_id = backend.token_to_id(eos_token)
        if eos_id is None:
            raise ConfigError(f"--eos: {eos_token!r} is not in the vocabulary of {name}")
        self.name = name
        self.eos_token: str | None = eos_token
        self.eos_id: int = eos_id
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1  # ids may have holes, so counting is not enough
        self._backend = backend
        special = {eos_token: eos_id}
        special |= {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        longest_first = sorted(special, key=lambda token: (-len(token), token))
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)))
        # The unknown token is often marked as special, but the model gives it for ordinary text.
        self._control_ids = set(special.values()) - {_unknown_id(backend)}

    @property
    def fingerprint(self) -> str:
        """See `Tokenizer`."""
        return hashlib.sha256(f"{self.eos_token}\n{self._backend.to_str()}".encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See `Tokenizer`.

        Raises:
            EntasisError: the tokenizer cannot write some text without a control token.
        """
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [
            encoding.ids if self._control_ids.isdisjoint(encoding.ids) else self._encode_in_pieces(text)
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def _encode_in_pieces(self, text: str) -> list[int]:
        """Encode a text in which the model itself finds a control token: break each written one after a character."""
        cuts = [0, *(match.start() + 1 for match in self._special_pattern.finditer(text)), len(text)]
        ids: list[int] = []
        for start, stop in pairwise(cuts):
            ids += self._backend.encode(text[start:stop], add_special_tokens=False).ids
        found = self._control_ids.intersection(ids)
        if found:
            token = self._backend.id_to_token(min(found))
            raise EntasisError(f"{self.name}: a text cannot be written without the control token {token!r}")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        text: str = self._backend.decode([i for i in ids if i not in self._control_ids], skip_special_tokens=False)
        return text

    def count_special(self, text: str) -> Counter[str]:
        """See `Tokenizer`."""
        return Counter(self._special_pattern.findall(text))

    def save(self, folder: Path) -> None:
        """See `Tokenizer`; `tokenizer.json` and `tokenizer_config.json` are what Hugging Face's tools read."""
        _save_description(self, folder, kind="file")
        (folder / "tokenizer.json").write_text(self._backend.to_str(pretty=True), encoding="utf-8")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eos_token}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def train_bpe(texts: Iterable[str], vocab_size: int) -> FileTokenizer:
    """A byte-level BPE (GPT-2's way of cutting words) of at most `vocab_size` tokens, the end of a document included.

    The result depends on the texts only. A small text may give fewer tokens than asked for.
    """
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BPE_EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    return FileTokenizer(backend, f"bpe:{vocab_size}", BPE_EOS)


def bpe_vocab_size(spec: str) -> int | None:
    """The N of `bpe:N`; None if `spec` is something else.

    Raises:
        ConfigError: N is no number, or too small.
    """
    if not spec.startswith("bpe:"):
        return None
    size = spec.removeprefix("bpe:")
    if not (size.isascii() and size.isdigit() and len(size) < 10) or int(size) < _SMALLEST_BPE:
        raise ConfigError(
            f"--tokenizer: {spec[:40]}: expected bpe:N with N of at least {_SMALLEST_BPE}, below a billion"
        )
    return int(size)


def open_tokenizer_file(path: Path, eos: str | None = None) -> FileTokenizer:
    """A Hugging Face `tokenizer.json`, or a folder that holds one.

    The end of a document is `eos` if given; else what `tokenizer_config.json` beside it says; else the one common name
    that the vocabulary has.

    Raises:
        ConfigError: there is no such file, it cannot be read, or its end-of-document token is not clear.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"--tokenizer: {path}: expected bytes, bpe:N, a tokenizer.json or a folder that holds one")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:
        if type(error) is not Exception:  # the library raises exactly that; anything else is a fault of ours
            raise
        reason = " ".join(str(error).split())
        raise ConfigError(f"--tokenizer: {file}: not a tokenizer of the tokenizers library ({reason})") from error
    return FileTokenizer(backend, path.resolve().name, eos or _configured_eos(file) or _common_eos(file, backend))


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `save` wrote.

    Raises:
        EntasisError: a file is missing or damaged, or is not the one that the description was made for.
    """
    path = folder / _DESCRIPTION
    description = _read_object(path)
    kind, name, eos_token = (description.get(key) for key in ("kind", "name", "eos_token"))
    tokenizer: Tokenizer
    if kind == "bytes":
        tokenizer = ByteTokenizer()
    elif kind == "file" and isinstance(name, str) and isinstance(eos_token, str):
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise EntasisError(f"{file}: missing; prepare the data again")
        opened = open_tokenizer_file(file, eos_token)
        opened.name = name
        tokenizer = opened
    else:
        raise EntasisError(f"{path}: unknown kind of tokenizer {kind!r}")
    if tokenizer.fingerprint != description.get("fingerprint"):
        raise EntasisError(f"{folder}: the tokenizer is not the one that was saved here; prepare the data again")
    return tokenizer


def _save_description(tokenizer: Tokenizer, folder: Path, kind: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    description = {
        "kind": kind,
        "name": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "eos_token": tokenizer.eos_token,
        "fingerprint": tokenizer.fingerprint,
    }
    (folder / _DESCRIPTION).write_text(json.dumps(description, indent=1), encoding="utf-8")


def _unknown_id(backend: Backend) -> int | None:
    model = json.loads(backend.to_str())["model"]
    if model.get("unk_token") is not None:
        return int(model["vocab"].get(model["unk_token"], -1))
    unknown = model.get("unk_id")  # Unigram writes the id
    return None if unknown is None else int(unknown)


def _configured_eos(file: Path) -> str | None:
    path = file.with_name("tokenizer_config.json")
    if file.name != "tokenizer.json" or not path.is_file():
        return None
    eos = _read_object(path).get("eos_token")
    if isinstance(eos, dict):
        eos = eos.get("content")
    return eos if isinstance(eos, str) else None


def _common_eos(file: Path, backend: Backend) -> str:
    found = [token for token in _COMMON_EOS if backend.token_to_id(token) is not None]
    if len(found) != 1:
        what = f"several candidates ({', '.join(found)})" if found else "no common name in the vocabulary"
        raise ConfigError(f"--eos: {file}: which token ends a document is not clear: {what}; name it with --eos TOKEN")
    return found[0]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EntasisError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise EntasisError(f"{path}: not JSON ({error})") from error
    if not isinstance(data, dict):
        raise EntasisError(f"{path}: expected an object")
    return data
