"""What goes wrong around a command: a folder of something else, no output, no memory, an early Ctrl-C."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from entasis.cli import main
from entasis.errors import ConfigError
from entasis.run.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from entasis.run.config import RunConfig, load_config
from entasis.run.folder import RunFolder
from entasis.shape.records import LayerShape, Shape


@pytest.mark.parametrize(
    ("error", "line", "status"),
    [
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "nobody reads the output any more", 1),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "not enough memory", 1),
        (RuntimeError("CUDA out of memory."), "not enough memory", 1),
        (OSError(errno.ENOSPC, "No space left on device", "x/y"), "x/y: no space left on device", 1),
    ],
)
def test_an_error_of_the_machine_is_one_line(error: Exception, line: str, status: int) -> None:
    said, code = main._explain(error)
    assert said.startswith(line)
    assert code == status


def test_a_command_that_fails_without_an_output_leaves_one_line() -> None:
    script = f"exec {sys.executable} -m entasis train no-such-file.yaml >&-"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False, env=os.environ.copy())
    assert done.returncode == 2
    assert done.stderr.startswith("error: no-such-file.yaml: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("train.threads=100000", "train.threads"),
        ('out="a\\0b"', "out"),
        ('data.path="a\\0b"', "data.path"),
        ("train.steps=0x" + "f" * 300, "train.steps"),
        ("optimizer.epsilon=1e-300", "optimizer.epsilon"),
        ("model.rotary_theta=1e-300", "model.rotary_theta"),
        ('compare={shapes: {a: {}}, prompt: "\\ud800"}', "compare.prompt"),
    ],
)
def test_settings_beyond_reason_are_refused_by_name(setting: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "data: {path: x}\nshape: {family: uniform, layers: 1, width: 8, heads: 1}\ntrain: {steps: 1}\nout: x\n",
        encoding="utf-8",
    )
    with pytest.raises(ConfigError) as caught:
        load_config(file, [setting])
    assert str(caught.value).startswith(line)
    assert len(str(caught.value)) < 300


def _config(out: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "data": {"path": "x"},
            "shape": {"family": "uniform", "layers": 1, "width": 8, "heads": 1},
            "train": {"steps": 1},
            "out": str(out),
        }
    )


_SHAPE = Shape((LayerShape(8, 1, 1, 8, 32),), 8)


def test_a_folder_with_somebodys_config_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine: true\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.yaml stands there without"):
        RunFolder(tmp_path).check(_config(tmp_path), _SHAPE, {})
    assert (tmp_path / "config.yaml").read_text(encoding="utf-8") == "mine: true\n"


def test_checkpoints_without_their_config_are_not_gone_on_with(tmp_path: Path) -> None:
    folder, config = RunFolder(tmp_path), _config(tmp_path)
    folder.write(config, config.design(257).shape, {})
    folder.config_file.unlink()
    assert not folder.check(config, config.design(257).shape, {}), "killed before its configuration was written"
    folder.checkpoints.mkdir()
    with pytest.raises(ConfigError, match=r"the config\.yaml that they were made with is gone"):
        folder.check(config, config.design(257).shape, {})


@pytest.mark.parametrize("change", [{"step": "7"}, {"step": -7}, {"tokens": None}, {"shape": []}, {"block": 3}])
def test_a_state_that_was_altered_with_its_checksum_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    state = {"tokens": 1, "shape": {}, "block": {}, "data_fingerprint": "f"}
    tampered = {key: value for key, value in change.items() if key != "step"}
    path = save_checkpoint(tmp_path, Checkpoint(7, {}, {}, {**state, **tampered}), keep=3)
    if "step" in change:
        path = path.rename(tmp_path / "step-00000008")
    with pytest.raises(Exception, match="altered"):
        load_checkpoint(path)
