"""A checkpoint from somebody else: whatever stands in its files is refused in one line, and nothing of it is run."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import entasis
from entasis.cli.main import run_command
from entasis.errors import EntasisError
from entasis.run.checkpoint import load_checkpoint
from entasis.run.config import RunConfig
from entasis.run.load import load_run
from entasis.train.loop import train

MakeConfig = Callable[..., RunConfig]
_SOURCES = Path(entasis.__file__).parent


@pytest.fixture
def checkpoint(make_config: MakeConfig, quiet: Console) -> Path:
    """The only checkpoint of a finished run."""
    config = make_config({"train.steps": 2, "train.checkpoint_every": 2})
    train(config, quiet)
    (path,) = (Path(config.out) / "checkpoints").iterdir()
    return path


def _sign(checkpoint: Path, **more: dict[str, Any]) -> None:
    """Makes sizes and checksums right again, as whoever alters a checkpoint would; with more entries."""
    marker = json.loads((checkpoint / "complete.json").read_text(encoding="utf-8"))
    for name in marker["files"]:
        file = checkpoint / name
        if file.is_file():
            content = file.read_bytes()
            marker["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    marker["files"] |= more
    (checkpoint / "complete.json").write_text(json.dumps(marker), encoding="utf-8")


def _refused(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The line with which the checkpoint is refused, everywhere alike."""
    with pytest.raises(EntasisError) as caught:
        load_checkpoint(checkpoint)
    run = checkpoint.parent.parent
    for arguments in (["train", str(run / "config.yaml")], ["generate", str(run), "x"]):
        capsys.readouterr()
        assert run_command(arguments) == 1
        errors = capsys.readouterr().err.splitlines()
        assert len(errors) <= 2, "`generate` says which checkpoint it passes over"
        assert errors[-1].startswith("error: ")
        assert "all 1 checkpoints are damaged" in errors[-1]
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


class _Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "complete.json"])
@pytest.mark.parametrize("protocol", [0, 4])
def test_a_pickle_under_another_name_is_not_unpickled(
    name: str, protocol: int, checkpoint: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (checkpoint / name).write_bytes(pickle.dumps(_Bomb(tmp_path / "owned"), protocol=protocol))
    if name != "complete.json":
        _sign(checkpoint)
    assert str(checkpoint) in _refused(checkpoint, capsys)
    assert not (tmp_path / "owned").exists(), "a file of a checkpoint was run"


def test_nothing_in_the_sources_unpickles_or_trusts_remote_code() -> None:
    """`weights_only=False`, `torch.load`, pickle and its kin, and `trust_remote_code` set for the user."""
    wrong = re.compile(
        r"trust_remote_code\s*=\s*True|\btorch\.load\(|\bweights_only\s*=\s*False|\b(c?[pP]ickle|dill|joblib|shelve|marshal)"
        r"\.loads?\b|allow_pickle\s*=\s*True|yaml\.(unsafe_load|full_load)|yaml\.(Unsafe|Full)?Loader\b|\beval\(|\bexec\("
    )
    files = sorted(_SOURCES.rglob("*.py"))
    assert len(files) > 50
    found = [
        f"{path.relative_to(_SOURCES)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if wrong.search(line) and "model.eval()" not in line and ".eval()" not in line
    ]
    assert not found


def _deep(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


_STATES: dict[str, Any] = {
    "step of another": {"step": 1},
    "huge step": {"step": 10**400},
    "huge tokens": {"tokens": "9" * 5000},
    "tokens below zero": {"tokens": -1},
    "tokens not finite": {"tokens": float("inf")},
    "true for a number": {"tokens": True},
    "no layers": {"shape": {"layers": [], "embed_width": 1}},
    "huge shape": {"shape": {"layers": [{"width": 10**30}], "embed_width": 10**30}},
    "shape of words": {"shape": {"layers": "many", "embed_width": "wide"}},
    "unknown block": {"block": {"style": "../../etc/passwd"}},
    "empty block": {"block": {}},
    "data of numbers": {"data_fingerprint": 3},
    "skipped of words": {"skipped": "all"},
    "skipped of floats": {"skipped": [1.5]},
    "skipped of all": {"skipped": {"1": 2}},
}


@pytest.mark.parametrize("changes", _STATES.values(), ids=_STATES.keys())
def test_a_state_with_hostile_values(
    changes: dict[str, Any], checkpoint: Path, capsys: pytest.CaptureFixture[str], quiet: Console
) -> None:
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    (checkpoint / "state.json").write_text(json.dumps(state | changes), encoding="utf-8")
    _sign(checkpoint)
    run = checkpoint.parent.parent
    capsys.readouterr()
    status = run_command(["train", str(run / "config.yaml"), "-s", "train.steps=3"])
    errors = capsys.readouterr().err.splitlines()
    assert status == 1
    assert len(errors) == 1
    assert "unexpected" not in errors[0]
    assert len(errors[0]) < 1000


@pytest.mark.parametrize(
    "text",
    [
        _deep(100_000),
        "[" * 100_000,
        "9" * 10_000,
        '{"step": 2}',
        "null",
        "[]",
        "\ufeff{}",
        '{"step": 1e999}',
        "NaN",
        "",
    ],
    ids=lambda text: text[:10],
)
@pytest.mark.parametrize("name", ["state.json", "complete.json"])
def test_json_that_is_hostile_as_such(
    name: str, text: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / name).write_text(text, encoding="utf-8")
    if name != "complete.json":
        _sign(checkpoint)
    assert str(checkpoint) in _refused(checkpoint, capsys)


@pytest.mark.parametrize(
    "name", ["../secret", "../../../secret", "/etc/passwd", "sub/../../x", "", ".", "x" * 5000, "a\0b"]
)
def test_names_in_the_marker_lead_nowhere(
    name: str, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is not one of a checkpoint's own files is refused, and nothing outside is opened."""
    (checkpoint.parent / "secret").write_text("secret", encoding="utf-8")
    entry = {"bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
    _sign(checkpoint, **{name: entry})
    opened: list[str] = []
    original = Path.open

    def watched(self: Path, *args: Any, **kwargs: Any) -> Any:
        opened.append(str(self))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", watched)
    line = _refused(checkpoint, capsys)
    assert "complete.json" in line
    outside = [path for path in opened if "secret" in path or path.startswith("/etc")]
    assert not outside


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "complete.json", ""])
@pytest.mark.parametrize("where", ["elsewhere", "nowhere", "itself"])
def test_links_out_of_the_folder_are_refused(
    name: str, where: str, checkpoint: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also where the content is right: what a checkpoint is lies in its folder."""
    file = checkpoint / name if name else checkpoint
    elsewhere = tmp_path / "elsewhere"
    shutil.move(file, elsewhere)
    file.symlink_to({"elsewhere": elsewhere, "nowhere": tmp_path / "nothing", "itself": file}[where])
    assert str(checkpoint) in _refused(checkpoint, capsys)
    assert elsewhere.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "complete.json"])
def test_a_pipe_or_a_folder_in_a_files_place_does_not_hang(
    name: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    assert str(checkpoint) in _refused(checkpoint, capsys)
    (checkpoint / name).unlink()
    (checkpoint / name).mkdir()
    assert str(checkpoint) in _refused(checkpoint, capsys)


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**40, 2**63, 2**64 - 1])
def test_a_header_of_a_length_that_lies(length: int, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(length.to_bytes(8, "little") + content[8:])
    _sign(checkpoint)
    assert str(checkpoint) in _refused(checkpoint, capsys)


def test_tensors_of_another_size_than_the_shape_says(checkpoint: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    name = next(iter(tensors))
    for wrong in (torch.zeros(3), torch.zeros(tensors[name].shape, dtype=torch.float64)):
        save_file({**tensors, name: wrong}, checkpoint / "model.safetensors")
        _sign(checkpoint)
        with pytest.raises(EntasisError, match=f"weight {name}: stored as"):
            load_run(checkpoint.parent.parent)
    save_file({f"{name}.more": torch.zeros(3), **tensors}, checkpoint / "model.safetensors")
    _sign(checkpoint)
    with pytest.raises(EntasisError, match="holds other weights"):
        load_run(checkpoint.parent.parent)
