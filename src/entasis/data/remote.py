"""Prepared folders at an address (`s3://`, `gs://`, `https://`, whatever fsspec reads), copied once into a cache.

A copy lies in a folder named by the data's fingerprint. Files are written under another name, compared with the
manifest's checksums and renamed; the manifest comes last. So each is there completely or not at all, however many
processes fetch at once (they take turns) and however they end. Nothing remote chooses the name of a local file but
through the manifest, whose names are plain, and nothing is unpacked.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from entasis.data.dataset import load_own_tokenizer, open_shard
from entasis.data.manifest import MANIFEST_FILE, TOKENIZER_FOLDER, Manifest, parse_manifest
from entasis.data.shards import DISK_DTYPE, DOCUMENTS_DTYPE
from entasis.data.tokenizers import TOKENIZER_FILES
from entasis.errors import ConfigError, EntasisError

_PIECE_BYTES: Final = 4 << 20
_LARGEST_MANIFEST_BYTES: Final = 256 << 20


def is_remote(path: str) -> bool:
    """Whether a path is an address."""
    return "://" in path


def fetch_prepared(address: str, cache: str | None, say: Callable[[str], None]) -> Path:
    """The local copy of a prepared folder. Without a connection, the copy that was made before.

    Args:
        address: of the folder.
        cache: where copies are kept; None: `entasis/data` in the user's cache folder.
        say: is told what is fetched.

    Raises:
        ConfigError: the kind of address is unknown, or needs a package that is not installed.
        EntasisError: it cannot be reached and there is no copy, or what came is not what the manifest says.
    """
    root = Path(cache) if cache else _user_cache() / "entasis" / "data"
    remote = _Remote(address)
    known = root / "addresses" / hashlib.sha256(remote.address.encode()).hexdigest()
    try:
        text = remote.read(MANIFEST_FILE, _LARGEST_MANIFEST_BYTES)
    except EntasisError as error:
        folder = root / known.read_text(encoding="utf-8").strip() if known.is_file() else None
        if folder is None or not (folder / MANIFEST_FILE).is_file():
            raise
        say(f"{error}; the copy in {folder} is used")
        return folder
    manifest = parse_manifest(text, f"{remote.address}/{MANIFEST_FILE}")
    folder = root / manifest.fingerprint
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            _fill(folder, manifest, text, remote, say)
        known.parent.mkdir(exist_ok=True)
        _write(known, [manifest.fingerprint.encode()])
    except OSError as error:
        raise EntasisError(
            f"{error.filename or folder}: cannot be written ({error.strerror or error}); make room, or choose another "
            "folder with data.cache"
        ) from error
    return folder


def _fill(folder: Path, manifest: Manifest, text: bytes, remote: _Remote, say: Callable[[str], None]) -> None:
    dtype = DISK_DTYPE[manifest.dtype]
    files = [
        (name, sha256, DOCUMENTS_DTYPE if name == split.documents.file else dtype, length)
        for split in (manifest.train, manifest.held_out)
        for name, sha256, length in split.files
    ]
    missing = [file for file in files if not _is_whole(folder, file[0], *file[2:])]
    if missing:
        say(f"{remote.address}: fetching {len(missing)} of {len(files)} files into {folder}")
    for name, sha256, *_ in missing:
        found = _write(folder / name, remote.pieces(name), expected=sha256)
        if found != sha256:
            raise EntasisError(
                f"{remote.address}/{name}: checksum is {found[:12]}…, the manifest says {sha256[:12]}…; what came is "
                "damaged, and was not kept"
            )
    if not (folder / MANIFEST_FILE).is_file():
        own = folder / TOKENIZER_FOLDER
        own.mkdir(exist_ok=True)
        for name in TOKENIZER_FILES:
            if remote.has(f"{TOKENIZER_FOLDER}/{name}"):
                _write(own / name, remote.pieces(f"{TOKENIZER_FOLDER}/{name}"))
        load_own_tokenizer(folder, manifest)
        _write(folder / MANIFEST_FILE, [text])


def _is_whole(folder: Path, name: str, dtype: str, length: int) -> bool:
    try:
        open_shard(folder, name, dtype, length)
    except EntasisError:
        return False
    return True


class _Remote:
    """A folder at an address. Each file system has errors of its own; all of them become one line here."""

    def __init__(self, address: str) -> None:
        import fsspec

        self.address = address.rstrip("/")
        try:
            self._system, self._root = fsspec.core.url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"data.path: {address}: {error}") from error

    def read(self, name: str, largest: int) -> bytes:
        """A file's content."""
        with self._errors(name), self._open(name) as file:
            content: bytes = file.read(largest + 1)
        if len(content) > largest:
            raise EntasisError(f"{self.address}/{name}: longer than {largest:,} bytes")
        return content

    def pieces(self, name: str) -> Iterator[bytes]:
        """A file's content in pieces."""
        with self._errors(name), self._open(name) as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        with self._errors(name):
            return bool(self._system.exists(f"{self._root}/{name}"))

    def _open(self, name: str) -> IO[bytes]:
        opened: IO[bytes] = self._system.open(f"{self._root}/{name}", "rb")
        return opened

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # botocore's, aiohttp's, google's ...: fsspec does not make them one kind
            reason = " ".join(str(error).split()) or type(error).__name__
            raise EntasisError(f"{self.address}/{name}: cannot be read ({type(error).__name__}: {reason})") from error


def _write(path: Path, pieces: Iterable[bytes], expected: str | None = None) -> str:
    """Writes a file completely or not at all, and only if its checksum is the expected one; returns the checksum."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    digest = hashlib.sha256()
    try:
        with part.open("wb") as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        if expected in {None, digest.hexdigest()}:
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return digest.hexdigest()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time; the kernel frees the lock however the process ends."""
    with (folder / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        # What a killed process left; nobody else writes now.
        for part in folder.glob(".*.part"):
            part.unlink(missing_ok=True)
        yield


def _user_cache() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    return Path(given) if given.startswith("/") else Path.home() / ".cache"
