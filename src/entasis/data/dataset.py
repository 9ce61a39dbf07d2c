"""What a run reads: the tokens of both sides with all that is known of them, and a prepared folder opened as such."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entasis.data.flat import FlatFile
from entasis.data.manifest import TOKENIZER_FOLDER, Manifest, SplitRecord, read_manifest
from entasis.data.mixture import MixedSplit
from entasis.data.npy import NpyFile
from entasis.data.shards import DISK_DTYPE, DOCUMENTS_DTYPE
from entasis.data.token_split import Int64Array, RecordedStarts, TokenSplit
from entasis.errors import EntasisError

if TYPE_CHECKING:
    from entasis.data.tokenizers import Tokenizer

__all__ = ["DataFile", "Int64Array", "Part", "TokenData", "TokenSource", "TokenSplit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSource:
    """Tokens that a run reads. What is None is not known of this kind of data."""

    path: Path
    """Where it lies, for messages."""
    name: str
    """What it is, in a word or a few."""
    vocab_size: int
    """Largest possible id + 1."""
    eos_id: int | None
    """Id between documents."""
    fingerprint: str
    """The same exactly if the data is."""
    train: TokenSplit | MixedSplit
    held_out: TokenSplit | MixedSplit
    request: dict[str, Any]
    """How it came to be, as plain data."""
    tokenizer_name: str | None = None
    tokenizer_fingerprint: str | None = None
    unigram_bits_per_byte: float | None = None
    """Bits per byte of held-out text under training frequencies of tokens."""
    files: tuple[DataFile, ...] = ()
    """Everything that is read."""
    bytes_per_token: float | None = None
    """UTF-8 bytes of held-out text per token."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The sources that it is mixed from, with weights that sum to 1."""
        return (Part(self.name, 1.0, self),)

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that made the tokens; None: it is not known, and tokens cannot become text.

        Raises:
            EntasisError: it is missing, damaged, or another one.
        """
        return None


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of tokens or of starts of documents."""

    path: Path
    """Absolute."""
    sha256: str | None
    """What it must be, where a manifest says so."""


@dataclass(frozen=True, slots=True)
class Part:
    """One source of a mixture."""

    name: str
    weight: float
    source: TokenSource


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenData(TokenSource):
    """A folder made by `entasis prepare`."""

    manifest: Manifest
    train: TokenSplit
    held_out: TokenSplit
    eos_id: int

    @classmethod
    def open(cls, path: str | Path) -> TokenData:
        """Open a folder: the manifest is checked, every file has its type and length. No token is read.

        Raises:
            EntasisError: something is missing or does not fit; the line names the file.
        """
        path = Path(path)
        manifest = read_manifest(path)
        return cls(
            path=path,
            name=manifest.name,
            vocab_size=manifest.vocab_size,
            eos_id=manifest.eos_id,
            fingerprint=manifest.fingerprint,
            train=_open_split(path, manifest.train, manifest, "train"),
            held_out=_open_split(path, manifest.held_out, manifest, "held-out"),
            request=manifest.request,
            tokenizer_name=manifest.tokenizer.name,
            tokenizer_fingerprint=manifest.tokenizer.fingerprint,
            unigram_bits_per_byte=manifest.unigram_bits_per_byte,
            bytes_per_token=manifest.held_out.bytes / manifest.held_out.tokens,
            files=tuple(
                DataFile((path / name).resolve(), sha256)
                for split in (manifest.train, manifest.held_out)
                for name, sha256, _ in split.files
            ),
            manifest=manifest,
        )

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer that made the tokens.

        Raises:
            EntasisError: it is missing, damaged, or another one.
        """
        return load_own_tokenizer(self.path, self.manifest)

    def verify(self) -> None:
        """Read every file: ids within the vocabulary, documents in order, checksums, and the tokenizer.

        Raises:
            EntasisError: something does not fit; the line names the file and, where it can, the offset.
        """
        from entasis.data.check import check_prepared

        for finding in check_prepared(self.path):
            raise EntasisError(finding.line)


def load_own_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    """The tokenizer that lies in a prepared folder.

    Raises:
        EntasisError: it is missing, damaged, or another one than the manifest names.
    """
    from entasis.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(folder / TOKENIZER_FOLDER)
    if tokenizer.fingerprint != manifest.tokenizer.fingerprint:
        raise EntasisError(f"{folder / TOKENIZER_FOLDER}: not the tokenizer that made these tokens")
    return tokenizer


def open_shard(folder: Path, name: str, dtype: str, length: int) -> NpyFile:
    """One file that a manifest names.

    Raises:
        EntasisError: it is missing or does not fit, or is a link that leads out of the folder.
    """
    path = folder / name
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        raise EntasisError(f"{path}: a link to {path.resolve()}, outside the folder; copy the file into the folder")
    return NpyFile(path, dtype, length)


def _open_split(folder: Path, record: SplitRecord, manifest: Manifest, name: str) -> TokenSplit:
    dtype = DISK_DTYPE[manifest.dtype]
    files: list[FlatFile] = [open_shard(folder, shard.file, dtype, shard.tokens) for shard in record.shards]
    starts = open_shard(folder, record.documents.file, DOCUMENTS_DTYPE, record.documents.count)
    return TokenSplit(
        folder,
        name,
        files,
        manifest.vocab_size,
        starts=RecordedStarts(starts),
    )
