"""Prepared folders at an address: complete copies, checked, usable offline and by several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from entasis.data.dataset import TokenData
from entasis.data.remote import fetch_prepared, is_remote
from entasis.errors import ConfigError, EntasisError

Prepare = Callable[..., TokenData]
ADDRESS = "memory://bucket/mine"


@pytest.fixture
def remote() -> Iterator[Callable[[Path], None]]:
    """Uploads a folder to `ADDRESS`."""
    memory = fsspec.filesystem("memory")

    def upload(folder: Path) -> None:
        if memory.exists("/bucket"):
            memory.rm("/bucket", recursive=True)
        memory.put(str(folder), "/bucket/mine", recursive=True)

    yield upload
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


def fetch(cache: Path, said: list[str] | None = None, address: str = ADDRESS) -> Path:
    return fetch_prepared(address, str(cache), (said if said is not None else []).append)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_addresses_are_told_from_paths() -> None:
    assert is_remote("s3://a/b") and is_remote("file:///a")
    assert not is_remote("data/mine") and not is_remote("C:\\data")


def test_a_copy_is_made_once_and_is_the_folder(
    prepare: Prepare, remote: Callable[[Path], None], tmp_path: Path
) -> None:
    data = prepare(tokenizer="bpe:300")
    remote(data.path)
    said: list[str] = []
    copy = fetch(tmp_path / "cache", said)
    assert files(copy) == files(data.path)
    TokenData.open(copy).verify()
    assert len(said) == 1 and "fetching 6 of 6 files" in said[0]
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    assert fetch(tmp_path / "cache", said) == copy
    assert len(said) == 1, "nothing is fetched again"
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


def test_a_warm_cache_serves_offline(prepare: Prepare, remote: Callable[[Path], None], tmp_path: Path) -> None:
    remote(prepare().path)
    copy = fetch(tmp_path / "cache")
    fsspec.filesystem("memory").rm("/bucket", recursive=True)
    said: list[str] = []
    assert fetch(tmp_path / "cache", said) == copy
    assert len(said) == 1 and "cannot be read" in said[0] and f"the copy in {copy} is used" in said[0]
    with pytest.raises(EntasisError, match=r"memory://bucket/mine/manifest\.json: cannot be read"):
        fetch(tmp_path / "cold")


def test_changed_data_is_another_copy(prepare: Prepare, remote: Callable[[Path], None], tmp_path: Path) -> None:
    remote(prepare().path)
    first = fetch(tmp_path / "cache")
    content = files(first)
    remote(prepare(["quite", "another", "text"], out="second").path)
    second = fetch(tmp_path / "cache")
    assert first != second and files(first) == content


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_what_comes_damaged_is_not_kept(
    prepare: Prepare, remote: Callable[[Path], None], tmp_path: Path, damage: str
) -> None:
    data = prepare()
    remote(data.path)
    memory, name = fsspec.filesystem("memory"), "/bucket/mine/train-00001.npy"
    whole = memory.cat_file(name)
    if damage == "gone":
        memory.rm(name)
    else:
        memory.pipe_file(name, whole[:-1] if damage == "cut" else whole[:300] + b"\xff" + whole[301:])
    with pytest.raises(EntasisError, match=r"train-00001\.npy: (checksum is .*not kept|cannot be read)"):
        fetch(tmp_path / "cache")
    (folder,) = [path for path in (tmp_path / "cache").iterdir() if path.name != "addresses"]
    assert (
        not list(folder.glob("*00001*"))
        and not list(folder.glob(".*.part"))
        and not (folder / "manifest.json").exists()
    )
    memory.pipe_file(name, whole)
    assert files(fetch(tmp_path / "cache")) == files(data.path), "goes on where it stopped"


def test_a_damaged_copy_is_mended(prepare: Prepare, remote: Callable[[Path], None], tmp_path: Path) -> None:
    data = prepare()
    remote(data.path)
    copy = fetch(tmp_path / "cache")
    os.truncate(copy / "train-00000.npy", 200)
    (copy / ".train-00001.npy.1.part").write_bytes(b"left by a killed process")
    said: list[str] = []
    fetch(tmp_path / "cache", said)
    assert files(copy) == files(data.path)
    assert "fetching 1 of" in said[0]


def test_a_remote_manifest_cannot_name_files_elsewhere(
    prepare: Prepare, remote: Callable[[Path], None], tmp_path: Path
) -> None:
    data = prepare()
    remote(data.path)
    manifest = (data.path / "manifest.json").read_text()
    for name in ("../../out.npy", "/tmp-out.npy", "a/b.npy"):
        fsspec.filesystem("memory").pipe_file(
            "/bucket/mine/manifest.json", manifest.replace("train-00000.npy", name).encode()
        )
        with pytest.raises(EntasisError, match="not the plain name of a file in this folder"):
            fetch(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_wrong_tokenizer_is_refused(prepare: Prepare, remote: Callable[[Path], None], tmp_path: Path) -> None:
    data, other = prepare(tokenizer="bpe:300"), prepare(["x y z", "a b c", "q"], out="other", tokenizer="bpe:300")
    remote(data.path)
    for file in (other.path / "tokenizer").iterdir():
        fsspec.filesystem("memory").pipe_file(f"/bucket/mine/tokenizer/{file.name}", file.read_bytes())
    with pytest.raises(EntasisError, match="not the tokenizer that made these tokens"):
        fetch(tmp_path / "cache")


def test_several_processes_fetch_at_once(prepare: Prepare, tmp_path: Path) -> None:
    data = prepare()
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                fetch(tmp_path / "cache", address=data.path.as_uri())
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    copy = fetch(tmp_path / "cache", address=data.path.as_uri())
    assert files(copy) == files(data.path)


def test_unknown_addresses_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path: nosuch://a: Protocol not known"):
        fetch(tmp_path / "cache", address="nosuch://a")


def test_the_cache_is_in_the_users_folder(prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    copy = fetch_prepared(prepare().path.as_uri(), None, lambda _: None)
    assert copy.parent == tmp_path / "xdg" / "entasis" / "data"


def test_a_cache_that_cannot_be_written_is_one_line(prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(EntasisError, match=r"cannot be written .* data\.cache"):
        fetch(tmp_path / "cache", address=prepare().path.as_uri())
