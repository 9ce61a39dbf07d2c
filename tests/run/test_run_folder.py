"""The run folder: one process at a time, one run for ever, metrics that survive a kill."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from entasis.errors import ConfigError, EntasisError
from entasis.run.config import RunConfig
from entasis.run.environment import environment_record
from entasis.run.folder import RunFolder

MakeConfig = Callable[..., RunConfig]
InChild = Callable[..., int]

_ENVIRONMENT = environment_record(torch.device("cpu"))


# --- the lock ---------------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_and_a_killed_one_leaves_nothing_stale(in_child: InChild, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    read, write = os.pipe()
    holder = os.fork()
    if holder == 0:
        with folder.locked():
            os.write(write, b"!")
            time.sleep(60)
        os._exit(0)
    try:
        assert os.read(read, 1) == b"!"

        def try_it() -> None:
            with pytest.raises(EntasisError, match=rf"process {holder} is working in this run folder"), folder.locked():
                pass

        assert in_child(try_it) == 0
        try_it()
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    with folder.locked():
        assert (folder.path / ".lock").read_text(encoding="utf-8") == str(os.getpid())
    with folder.locked():
        pass


def test_the_lock_is_freed_by_an_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ZeroDivisionError), folder.locked():
        raise ZeroDivisionError
    with folder.locked():
        pass


@pytest.mark.parametrize("there", ["", "a", "a/b/run"])
def test_a_start_that_fails_at_once_removes_what_it_made(there: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "b" / "run")
    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ZeroDivisionError), folder.locked():
        folder.log("a line")
        raise ZeroDivisionError
    assert sorted(tmp_path.rglob("*")) == before


def test_what_was_there_stays(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.locked():
        folder.log("a line")
    before = sorted(tmp_path.rglob("*"))
    assert [path.name for path in before] == ["run", ".lock", "log.txt"]
    with pytest.raises(ZeroDivisionError), folder.locked():
        folder.log("another line")
        raise ZeroDivisionError
    assert sorted(tmp_path.rglob("*")) == before
    assert folder.log_file.read_text(encoding="utf-8").count("line") == 2


def test_a_start_that_wrote_something_keeps_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ZeroDivisionError), folder.locked():
        folder.log("a line")
        folder.append_metrics({"step": 1})
        raise ZeroDivisionError
    assert {path.name for path in folder.path.iterdir()} == {".lock", "log.txt", "metrics.jsonl"}


@pytest.mark.parametrize("when", ["opened", "locked"])
def test_a_folder_that_another_start_removes_meanwhile_is_made_again(
    when: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Between the making of the folder and the opening of the lock, or between its opening and its locking."""
    folder = RunFolder(tmp_path / "run")
    removed: list[str] = []

    def remove() -> None:
        if not removed:
            removed.append(when)
            (folder.path / ".lock").unlink(missing_ok=True)
            folder.path.rmdir()

    if when == "opened":
        opened = Path.open

        def open_late(self: Path, *arguments: Any, **more: Any) -> Any:
            remove()
            return opened(self, *arguments, **more)

        monkeypatch.setattr(Path, "open", open_late)
    else:
        flock = fcntl.flock

        def flock_late(*arguments: Any) -> None:
            remove()
            flock(*arguments)

        monkeypatch.setattr(fcntl, "flock", flock_late)
    with folder.locked():
        assert removed
        assert (folder.path / ".lock").read_text(encoding="utf-8") == str(os.getpid())


# --- what the run is --------------------------------------------------------------------------------------------------


def _begin(config: RunConfig) -> RunFolder:
    folder = RunFolder(Path(config.out))
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write(config, config.design(257).shape, _ENVIRONMENT)
    return folder


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json", "results.json"])
def test_files_of_somebody_else_are_not_mixed_with_a_run(name: str, make_config: MakeConfig) -> None:
    config = make_config()
    folder = RunFolder(Path(config.out))
    folder.path.mkdir(parents=True)
    (folder.path / ".hidden").touch()
    assert folder.check(config, config.design(257).shape, _ENVIRONMENT) == []
    (folder.path / name).touch()
    with pytest.raises(ConfigError, match=rf"^out: .* holds other files \({name}\); choose an empty or new folder"):
        folder.check(config, config.design(257).shape, _ENVIRONMENT)


def test_a_study_goes_into_a_folder_of_its_own(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--out: .* holds a run of `entasis train`"):
        _begin(make_config()).require_study("--out")
    folder = RunFolder(tmp_path / "study")
    folder.require_study()
    folder.path.mkdir()
    (folder.path / "text.txt").touch()
    with pytest.raises(ConfigError, match=r"^out: .* holds other files \(text\.txt\)"):
        folder.require_study()
    (folder.path / "runs").mkdir()
    folder.require_study()  # a note that somebody adds to a study is not in its way


def test_a_run_comes_back_as_it_was_begun(make_config: MakeConfig) -> None:
    config = make_config()
    assert RunFolder(Path(config.out)).check(config, config.design(257).shape, _ENVIRONMENT) == []
    folder = _begin(config)
    assert folder.read_config() == config
    assert folder.read_shape() == config.design(257).shape
    assert folder.read_environment() == _ENVIRONMENT
    assert folder.check(config, config.design(257).shape, _ENVIRONMENT) == []


def test_the_environment_names_what_bits_depend_on() -> None:
    assert _ENVIRONMENT["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"python", "packages", "device", "device_name", "threads", "platform"} <= _ENVIRONMENT.keys()
    assert _ENVIRONMENT["threads"] >= 1
    json.dumps(_ENVIRONMENT)


@pytest.mark.parametrize(
    ("change", "before", "now"),
    [
        ({"train.batch_tokens": 128}, "64", "128"),
        ({"train.micro_batch": 4}, "2", "4"),
        ({"train.precision": "bf16"}, "'fp32'", "'bf16'"),
        ({"train.seed": 1}, "0", "1"),
        ({"optimizer.learning_rate": 0.001}, "0.003", "0.001"),
        ({"optimizer.weight_decay": 0.2}, "0.1", "0.2"),
        ({"optimizer.betas": [0.9, 0.99]}, "[0.9, 0.95]", "[0.9, 0.99]"),
        ({"optimizer.epsilon": 1e-6}, "1e-08", "1e-06"),
        ({"optimizer.clip": None}, "1.0", "None"),
        ({"schedule.name": "constant"}, "'cosine'", "'constant'"),
        ({"schedule.warmup_steps": 4}, "3", "4"),
        ({"schedule.final_ratio": 0.0}, "0.1", "0.0"),
        ({"data.document_mask": True}, "False", "True"),
        ({"model.style": "gpt2"}, "'llama'", "'gpt2'"),
        ({"model.rotary_theta": 500.0}, "10000.0", "500.0"),
        ({"model.norm": "layernorm"}, "None", "'layernorm'"),
        ({"model.context": 8}, "16", "8"),
        ({"shape.embed_width": 32}, "24", "32"),
    ],
    ids=str,
)
def test_a_changed_setting_is_refused_with_both_values(
    change: dict[str, Any], before: str, now: str, make_config: MakeConfig
) -> None:
    folder = _begin(make_config())
    saved = {path: path.read_bytes() for path in folder.path.iterdir()}
    config = make_config(change)
    with pytest.raises(ConfigError) as caught:
        folder.check(config, config.design(257).shape, _ENVIRONMENT)
    (name,) = change
    assert str(caught.value) == (
        f"{name}: the run in {folder.path} was begun with {before}, and now it is {now}; "
        "set it back, or choose another `out`"
    )
    assert {path: path.read_bytes() for path in folder.path.iterdir()} == saved, "a refusal changes nothing"


@pytest.mark.parametrize(
    "change",
    [
        {"train.steps": 20},
        {"train.evaluate_every": 2},
        {"train.evaluate_tokens": 32},
        {"train.checkpoint_every": 1},
        {"train.keep_checkpoints": 1},
        {"train.threads": 2},
        {"train.compile": True},
        {"data.path": "elsewhere"},
        {"compare": {"shapes": {"uniform": {"family": "uniform", "layers": 2, "width": 16, "heads": 2}}}},
    ],
    ids=str,
)
def test_a_setting_that_may_change_is_said(change: dict[str, Any], make_config: MakeConfig) -> None:
    folder = _begin(make_config())
    config = make_config(change)
    lines = folder.check(config, config.design(257).shape, _ENVIRONMENT)
    assert lines
    assert all(line.startswith(next(iter(change))) and " -> " in line for line in lines)
    assert all("\n" not in line for line in lines)


def test_another_environment_is_said(make_config: MakeConfig) -> None:
    folder = _begin(make_config())
    config = make_config()
    lines = folder.check(config, config.design(257).shape, {**_ENVIRONMENT, "threads": 77})
    assert lines == [f"threads: {_ENVIRONMENT['threads']} -> 77"]


def test_an_edited_shape_is_refused_although_all_tensors_would_fit(make_config: MakeConfig) -> None:
    """Two heads of 12 and three of 8 make the same matrices."""
    config = make_config()
    folder = _begin(config)
    shape = json.loads(folder.shape_file.read_text(encoding="utf-8"))
    shape["layers"][2] |= {"heads": 3, "kv_heads": 3, "head_dim": 8}
    folder.shape_file.write_text(json.dumps(shape), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^shape: .*shape\.json is not the shape of .*config\.yaml"):
        folder.check(config, config.design(257).shape, _ENVIRONMENT)


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"layers": []}', '{"layers": [3], "embed_width": 4}', None])
@pytest.mark.parametrize("name", ["shape_file", "environment_file"])
def test_damaged_files_give_one_line_that_names_them(name: str, content: str | None, make_config: MakeConfig) -> None:
    config = make_config()
    folder = _begin(config)
    file: Path = getattr(folder, name)
    if content is None:
        file.unlink()
    else:
        file.write_text(content, encoding="utf-8")
    if name == "environment_file" and (content is None or content.startswith('{"')):
        return  # none, or another one: a record of the past that a run can go on without
    with pytest.raises(EntasisError) as caught:
        folder.check(config, config.design(257).shape, _ENVIRONMENT)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


# --- metrics ----------------------------------------------------------------------------------------------------------


def _steps(folder: RunFolder) -> list[tuple[int, float]]:
    return [(record["step"], record["train_loss"]) for record in folder.read_metrics()]


def test_metrics_are_read_in_order_and_a_repeated_step_counts_last(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_metrics() == []
    for step, loss in ((1, 5.0), (2, 4.0), (3, 3.0), (2, 2.5), (3, 2.0), (4, 1.0)):
        folder.append_metrics({"step": step, "train_loss": loss})
    folder.sync_metrics()
    assert _steps(folder) == [(1, 5.0), (2, 2.5), (3, 2.0), (4, 1.0)]
    assert len(folder.metrics_file.read_text(encoding="utf-8").splitlines()) == 6, "nothing is taken away"


def test_what_a_run_did_beyond_the_checkpoint_that_it_went_back_to_is_not_part_of_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step, loss in ((1, 5.0), (2, 4.0), (3, 3.0), (4, 2.0), (2, 9.0)):
        folder.append_metrics({"step": step, "train_loss": loss})
    assert _steps(folder) == [(1, 5.0), (2, 9.0)]


def test_a_torn_last_line_is_mended_wherever_it_was_torn(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.mend_metrics()
    assert not folder.metrics_file.exists()
    for step in (1, 2):
        folder.append_metrics({"step": step, "train_loss": 1.0})
    content = folder.metrics_file.read_bytes()
    first = content.index(b"\n") + 1
    for length in range(first, len(content)):
        folder.metrics_file.write_bytes(content[:length])
        assert _steps(folder) == [(1, 1.0)], "a reader in the meantime is not disturbed"
        folder.mend_metrics()
        assert folder.metrics_file.read_bytes() == content[:first]
    folder.append_metrics({"step": 2, "train_loss": 1.0})
    assert folder.metrics_file.read_bytes() == content
    folder.mend_metrics()
    assert folder.metrics_file.read_bytes() == content
    folder.metrics_file.write_bytes(content[: first - 1])
    folder.mend_metrics()
    assert folder.metrics_file.read_bytes() == b""


@pytest.mark.parametrize("line", ["nonsense", "{}", "[]", "3", '{"step": null}', "\0\0\0"])
def test_a_damaged_line_within_is_an_error_that_names_it(line: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics({"step": 1})
    with folder.metrics_file.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    folder.append_metrics({"step": 3})
    with pytest.raises(EntasisError, match=r"metrics\.jsonl: line 2 is not a record"):
        folder.read_metrics()


def test_the_log_has_times(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.log("one")
    folder.log("two × three")
    lines = folder.log_file.read_text(encoding="utf-8").splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["one", "two × three"]
    assert all(line[:4].isdigit() and line.split(" ")[0].endswith("+00:00") for line in lines)
