"""From text to a folder of token shards: read, choose what is held out, train or open the tokenizer, encode, write.

The text is read from its files two or three times (to measure it, to train a BPE, to encode it) and never held as a
whole; what grows with the text is some forty bytes of memory per document. What comes from the network is read once,
into a compressed copy that goes when the folder is done. The folder depends on the request only, not on the number of
processes.
"""

from __future__ import annotations

import dataclasses
import math
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from entasis.data.dataset import TokenData
from entasis.data.documents import Sources
from entasis.data.encode import Piece, encode_all
from entasis.data.manifest import (
    FORMAT,
    MANIFEST_FILE,
    TOKENIZER_FOLDER,
    VERSION,
    Manifest,
    SplitRecord,
    TokenizerRecord,
    read_manifest,
    write_manifest,
)
from entasis.data.shards import SplitWriter, token_dtype
from entasis.data.split import Mask, choose_held_out, cut_tail
from entasis.data.streamed import read_once
from entasis.data.tiktoken_ranks import PREFIX as TIKTOKEN
from entasis.data.tiktoken_ranks import open_tiktoken
from entasis.data.tokenizers import (
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    bpe_vocab_size,
    open_tokenizer_file,
    train_bpe,
)
from entasis.data.workplace import complete_or_absent
from entasis.errors import ConfigError, EntasisError

DEFAULT_SHARD_TOKENS = 100_000_000
SMALLEST_SHARD_TOKENS = 512
"""Each shard is a file, and a text of some size would be more files than a folder holds well."""
_SMALL_TEXT_BYTES = 16 << 20  # below this, starting processes takes longer than they save

Progress = Callable[[Literal["streaming", "reading", "training the tokenizer", "encoding"], int, int | None], None]
"""Called with what is being done, the bytes of text done, and the bytes in all (None: not known yet)."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """What to prepare. Everything here, and nothing else, decides what the folder will hold.

    Raises:
        ConfigError: a setting is out of range; the line names the option.
    """

    sources: Sources
    tokenizer: str = "bytes"
    """`bytes`, `bpe:N`, `tiktoken:NAME`, or the path of a Hugging Face tokenizer.json or of a folder that holds one."""
    eos: str | None = None
    """Token that ends a document, for a tokenizer file that does not say."""
    held_out: float = 0.01
    """Share of the documents that is held out."""
    shard_tokens: int = DEFAULT_SHARD_TOKENS
    """Tokens per shard, at most."""

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ConfigError(f"--held-out: expected a share between 0 and 1, got {self.held_out}")
        if self.shard_tokens < SMALLEST_SHARD_TOKENS:
            raise ConfigError(f"--shard-tokens: expected at least {SMALLEST_SHARD_TOKENS}, got {self.shard_tokens}")
        is_made = self.tokenizer == "bytes" or bpe_vocab_size(self.tokenizer) is not None
        if self.eos is not None and (is_made or self.tokenizer.startswith(TIKTOKEN)):
            raise ConfigError(f"--eos: only for a tokenizer file; {self.tokenizer} has its own")

    def request(self) -> dict[str, Any]:
        """What the manifest keeps to tell one request from another: no places, no times."""
        tokenizer: str | dict[str, str] = self.tokenizer
        if self.tokenizer != "bytes" and bpe_vocab_size(self.tokenizer) is None:
            opened = self.given_tokenizer()
            tokenizer = {"name": opened.name, "fingerprint": opened.fingerprint}
        return {
            "sources": self.sources.identity(),
            "text_field": self.sources.text_field,
            "documents": self.sources.limit,
            "tokenizer": tokenizer,
            "held_out": self.held_out,
            "shard_tokens": self.shard_tokens,
        }

    def given_tokenizer(self) -> FileTokenizer:
        """The tokenizer of a file or of tiktoken, where `tokenizer` names one.

        Raises:
            EntasisError: it is not there or cannot be used.
        """
        if self.tokenizer.startswith(TIKTOKEN):
            return open_tiktoken(self.tokenizer)
        return open_tokenizer_file(Path(self.tokenizer), self.eos)


def find_prepared(preparation: Preparation, out: Path) -> TokenData | None:
    """The data that `out` already holds for the same request; None if `out` is free.

    Raises:
        ConfigError: `out` holds something else.
        EntasisError: `out` holds damaged data.
    """
    if not out.exists():
        return None
    if not out.is_dir():
        raise ConfigError(f"--out: {out} is a file")
    if not any(out.iterdir()):
        return None
    if not (out / MANIFEST_FILE).exists():
        raise ConfigError(f"--out: {out} holds other files; choose an empty or new folder")
    made, wanted = read_manifest(out).request, preparation.request()
    for key in wanted:
        if made.get(key) != wanted[key]:
            raise ConfigError(
                f"--out: {out} holds other data ({key}: {made.get(key)}, now {wanted[key]}); choose another folder or "
                "use --force"
            )
    return TokenData.open(out)


def _silent(_what: str, _done: int, _total: int | None) -> None:
    """Nobody wants to know."""


def prepare_data(
    preparation: Preparation,
    out: Path,
    *,
    processes: int | None = None,
    replace: bool = False,
    progress: Progress = _silent,
) -> TokenData:
    """Make the folder `out`: complete when it appears, and never there by half.

    Args:
        preparation: what to prepare.
        out: the folder; only an empty one may exist, unless `replace`, which replaces prepared data.
        processes: worker processes; None: one per core that this process may use, one if the text is small.
        replace: whether data prepared earlier may be replaced.
        progress: told how far it is.

    Raises:
        EntasisError: text, tokenizer or folder cannot be used; the line says which and why.
    """
    if processes is not None and processes < 1:
        raise ConfigError(f"--processes: expected at least 1, got {processes}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not (replace and (out / MANIFEST_FILE).exists()):
        raise ConfigError(f"--out: {out} is not an empty folder; choose another one")
    request = preparation.request()
    try:
        with complete_or_absent(out.resolve(), replace=replace) as folder:
            with read_once(preparation.sources, folder, partial(progress, "streaming")) as sources:
                here = dataclasses.replace(preparation, sources=sources)
                manifest = _fill(folder, here, request, processes, progress)
            write_manifest(manifest, folder)
    except OSError as error:
        raise EntasisError(f"{error.filename or out}: cannot be written ({error.strerror})") from error
    return TokenData.open(out)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the first reading found: which documents there are and where each goes."""

    held_out: Mask
    """Per document."""
    text_bytes: int
    train_bytes: int
    empty: int

    @property
    def cut(self) -> bool:
        """A single document: its tail is held out."""
        return len(self.held_out) == 1


def _fill(
    folder: Path, preparation: Preparation, request: dict[str, Any], processes: int | None, progress: Progress
) -> Manifest:
    sources = preparation.sources
    plan = _measure(preparation, progress)

    def pieces() -> Iterator[Piece]:
        return _pieces(sources, plan, preparation.held_out)

    tokenizer = _make_tokenizer(preparation, plan, pieces, progress)
    tokenizer.save(folder / TOKENIZER_FOLDER)
    if processes is None:
        processes = 1 if plan.text_bytes < _SMALL_TEXT_BYTES else _available_cores()
    writers = {
        side: SplitWriter(folder, prefix, vocab_size=tokenizer.vocab_size, shard_tokens=preparation.shard_tokens)
        for side, prefix in ((False, "train"), (True, "held-out"))
    }
    special: Counter[str] = Counter()
    done = 0
    try:
        with closing(encode_all(pieces(), folder / TOKENIZER_FOLDER, processes)) as encoded_batches:
            for batch, encoded in encoded_batches:
                special += encoded.special
                held = np.array([piece.held_out for piece in batch])
                held_ids = np.repeat(held, encoded.lengths)
                for side, writer in writers.items():
                    writer.add(
                        encoded.ids[held_ids == side],
                        encoded.lengths[held == side],
                        sum(piece.bytes for piece in batch if piece.held_out == side),
                    )
                done += sum(piece.bytes for piece in batch)
                progress("encoding", done, plan.text_bytes)
        if done != plan.text_bytes:
            raise EntasisError("SOURCE: the text changed while it was read; try again")
        train, held_out = writers[False].finish(), writers[True].finish()
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise
    manifest = Manifest(
        format=FORMAT,
        version=VERSION,
        name=sources.name,
        fingerprint="0" * 64,
        dtype=token_dtype(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        tokenizer=TokenizerRecord(
            name=tokenizer.name, eos_token=tokenizer.eos_token, fingerprint=tokenizer.fingerprint
        ),
        held_out_by="tail" if plan.cut else "document",
        unigram_bits_per_byte=_unigram_bits_per_byte(writers[False], writers[True], held_out),
        special_tokens_in_text=dict(sorted(special.items())),
        empty_documents=plan.empty,
        request=request,
        train=train,
        held_out=held_out,
    )
    return manifest.model_copy(update={"fingerprint": manifest.computed_fingerprint()})


def _measure(preparation: Preparation, progress: Progress) -> _Plan:
    sizes = array("q")
    empty = total = reported = 0
    for text in preparation.sources.documents():
        if not text.strip():
            empty += 1
            continue
        sizes.append(len(text.encode()))
        total += sizes[-1]
        if total - reported >= 1 << 20:
            progress("reading", total, None)
            reported = total
    if not sizes:
        raise EntasisError(f"SOURCE: {preparation.sources.name} holds no text")
    document_bytes = np.frombuffer(sizes, np.int64)
    if len(sizes) == 1:
        return _Plan(np.array([False]), total, total, empty)
    held_out = choose_held_out(document_bytes, preparation.held_out)
    return _Plan(held_out, total, int(document_bytes[~held_out].sum()), empty)


def _pieces(sources: Sources, plan: _Plan, fraction: float) -> Iterator[Piece]:
    number = 0
    for text in sources.documents():
        if not text.strip():
            continue
        if number == len(plan.held_out):
            raise EntasisError("SOURCE: the text changed while it was read; try again")
        if plan.cut:
            head, tail = cut_tail(text, fraction)
            if not tail:
                raise EntasisError(
                    f"SOURCE: {sources.name} holds a single character; nothing would be left to train on"
                )
            yield Piece(head, len(head.encode()), held_out=False, closed=False)
            yield Piece(tail, len(tail.encode()), held_out=True, closed=True)
        else:
            yield Piece(text, len(text.encode()), held_out=bool(plan.held_out[number]), closed=True)
        number += 1


def _make_tokenizer(
    preparation: Preparation, plan: _Plan, pieces: Callable[[], Iterator[Piece]], progress: Progress
) -> Tokenizer:
    if preparation.tokenizer == "bytes":
        return ByteTokenizer()
    vocab_size = bpe_vocab_size(preparation.tokenizer)
    if vocab_size is None:
        return preparation.given_tokenizer()

    def train_texts() -> Iterator[str]:
        done = 0
        for piece in pieces():
            if not piece.held_out:
                yield piece.text
                done += piece.bytes
                progress("training the tokenizer", done, plan.train_bytes)

    return train_bpe(train_texts(), vocab_size)


def _unigram_bits_per_byte(train: SplitWriter, held_out: SplitWriter, record: SplitRecord) -> float:
    smoothed = train.token_counts + 1
    bits = math.log2(int(smoothed.sum())) - np.log2(smoothed)
    return float(bits @ held_out.token_counts / record.bytes)


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
