"""`manifest.json` of a prepared folder: what the data is, checked field by field when it is read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from entasis.errors import EntasisError

MANIFEST_FILE = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
FORMAT: Final = "entasis-tokens"
VERSION: Final = 1


def _plain_name(name: str) -> str:
    if PurePosixPath(name).name != name or "\\" in name or ":" in name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is not the plain name of a file in this folder")
    return name


FileName = Annotated[str, AfterValidator(_plain_name)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ShardRecord(_Record):
    """One file of tokens."""

    file: FileName
    tokens: PositiveInt
    sha256: Sha256


class DocumentsRecord(_Record):
    """The file that says where documents start: int64 token positions within the split, ascending."""

    file: FileName
    count: PositiveInt
    sha256: Sha256


class SplitRecord(_Record):
    """One side of the split."""

    tokens: PositiveInt
    bytes: PositiveInt
    """UTF-8 bytes of the text behind the tokens."""
    content: Sha256
    """Of all token values in order, wherever the borders of shards lie."""
    shards: Annotated[list[ShardRecord], Field(min_length=1)]
    documents: DocumentsRecord

    @property
    def files(self) -> list[tuple[str, str, int]]:
        """Name, checksum and length of each file, that of the documents last."""
        shards = [(shard.file, shard.sha256, shard.tokens) for shard in self.shards]
        return [*shards, (self.documents.file, self.documents.sha256, self.documents.count)]


class TokenizerRecord(_Record):
    """The tokenizer that made the tokens; it lies beside the manifest in a folder of its own."""

    name: str
    eos_token: str | None
    fingerprint: Sha256


class Manifest(_Record):
    """Everything about a prepared folder but the tokens. Nothing in it depends on place, time or processes."""

    format: Literal["entasis-tokens"]
    version: Literal[1]
    name: str
    """What the text is, in a word or a few."""
    fingerprint: Sha256
    """The same for two folders exactly if their tokens, documents, split and tokenizer are the same."""
    dtype: Literal["uint16", "uint32"]
    vocab_size: PositiveInt
    eos_id: NonNegativeInt
    tokenizer: TokenizerRecord
    held_out_by: Literal["document", "tail"]
    """Whole documents were held out; or, of a single document, its tail."""
    unigram_bits_per_byte: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Bits per byte of held-out text under training frequencies of tokens (add-one smoothing), without context."""
    special_tokens_in_text: dict[str, PositiveInt]
    """How often written control tokens stood in the text; they were encoded as ordinary text."""
    empty_documents: NonNegativeInt
    """Documents without text that were left out."""
    request: dict[str, Any]
    """What was asked for; the same request on the same sources gives the same folder."""
    train: SplitRecord
    held_out: SplitRecord

    def computed_fingerprint(self) -> str:
        """What `fingerprint` must be."""
        parts: list[object] = [FORMAT, VERSION, self.dtype, self.vocab_size, self.eos_id, self.tokenizer.fingerprint]
        for split in (self.train, self.held_out):
            parts += [split.tokens, split.bytes, split.content, split.documents.sha256]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write `manifest.json`."""
    (folder / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read and check `manifest.json`.

    Raises:
        EntasisError: it is missing, damaged, of another format, or its numbers contradict each other.
    """
    path = folder / MANIFEST_FILE
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        raise EntasisError(f"{folder}: holds no prepared data (no {MANIFEST_FILE}); run entasis prepare") from error
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise EntasisError(f"{folder}: holds no prepared data that can be read ({MANIFEST_FILE}: {why})") from error
    return parse_manifest(text, path)


def parse_manifest(text: bytes, path: str | Path) -> Manifest:
    """Check a manifest's text; `path` is what messages name.

    Raises:
        EntasisError: as `read_manifest`.
    """
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise EntasisError(f"{path}: {where}: {first['msg']}; it was damaged or made by another version") from error
    for name, split in (("train", manifest.train), ("held_out", manifest.held_out)):
        total = sum(shard.tokens for shard in split.shards)
        if total != split.tokens:
            raise EntasisError(f"{path}: {name}.tokens: {split.tokens}, but its shards hold {total}")
    largest_id = 65_535 if manifest.dtype == "uint16" else 4_294_967_295
    if not manifest.eos_id < manifest.vocab_size <= largest_id + 1:
        raise EntasisError(
            f"{path}: vocab_size: {manifest.vocab_size} does not fit eos_id {manifest.eos_id} and {manifest.dtype}"
        )
    if manifest.fingerprint != manifest.computed_fingerprint():
        raise EntasisError(f"{path}: fingerprint: does not belong to the rest of the file; it was edited or damaged")
    return manifest
