"""Checkpoints of several files, one for each rank that held a part: put together, checked, and never unpickled."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from entasis.errors import EntasisError
from entasis.run import checkpoint as checkpoint_module
from entasis.run.checkpoint import Checkpoint, load_checkpoint, load_newest, save_parts

OnRanks = Callable[[int, Callable[[int], object]], dict[int, str]]
MODEL = {
    "a": torch.arange(15.0).view(5, 3),
    "one": torch.tensor([3.0]),  # fewer rows than ranks
    "experts": torch.arange(24.0).view(3, 2, 4),
}
OPTIMIZER = {"a:exp_avg": torch.arange(15.0).view(5, 3) / 7, "a:step": torch.tensor(4.0)}
STATE: dict[str, Any] = {"tokens": 64, "shape": {}, "block": {}, "data_fingerprint": "f"}


@pytest.fixture
def saved(tmp_path: Path, on_ranks: OnRanks) -> Path:
    """A checkpoint that two ranks wrote."""

    def work(rank: int) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        @contextmanager
        def together() -> Iterator[None]:
            yield
            dist.barrier()

        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2,))

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) if tensor.ndim else tensor

        parts = [{name: cut(tensor) for name, tensor in whole.items()} for whole in (MODEL, OPTIMIZER)]
        save_parts(tmp_path / "saved", Checkpoint(4, parts[0], parts[1], STATE), 2, first=rank == 0, together=together)
        dist.destroy_process_group()

    assert on_ranks(2, work) == {}
    return tmp_path / "saved" / "step-00000004"


def test_the_parts_make_up_the_whole(saved: Path) -> None:
    assert len(list(saved.glob("shard-*.safetensors"))) == 2
    assert {path.suffix for path in saved.iterdir()} == {".safetensors", ".json"}, "nothing pickled"
    loaded = load_checkpoint(saved)
    assert loaded.step == 4
    assert loaded.state == STATE
    for found, expected in ((loaded.model, MODEL), (loaded.optimizer, OPTIMIZER)):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_nothing_is_unpickled(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (saved / ".metadata").write_bytes(pickle.dumps({"a": 1}))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    assert load_checkpoint(saved).step == 4


def test_every_damage_is_found(saved: Path, tmp_path: Path) -> None:
    for path in sorted(saved.iterdir()):
        for damage in ("flip", "cut", "remove"):
            copy = tmp_path / path.name / damage / saved.name
            shutil.copytree(saved, copy)
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            file = copy / path.name
            if damage == "remove":
                file.unlink()
            else:
                file.write_bytes(content if damage == "flip" else content[:-1])
            with pytest.raises(EntasisError, match=path.name.replace(".", r"\.")):
                load_checkpoint(copy)
            said: list[str] = []
            shutil.copytree(saved, copy.with_name("step-00000002"))
            state = json.loads((saved / "state.json").read_text())
            assert state["step"] == 4
            with pytest.raises(EntasisError, match="all 2 checkpoints are damaged"):  # the copy says step 4 too
                load_newest(copy.parent, said.append)
            assert len(said) == 2


def test_a_file_more_is_refused(saved: Path) -> None:
    save_file({"a": torch.zeros(5, 3)}, saved / "shard-00003-model-00001-of-00001.safetensors")
    with pytest.raises(EntasisError, match="put there afterwards"):
        load_checkpoint(saved)


@pytest.mark.parametrize("offset", [[-1, 0], [10**9, 0], ["x", 0], [0], None])
def test_headers_that_lie(offset: Any, saved: Path) -> None:
    """Also where the checksums were made to fit: a line, and no memory for what does not exist."""
    for path in sorted(saved.glob("shard-*")):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        places = json.loads(metadata["DCP_SHARDING_INFO"])
        if "a" in places and places["a"]["saved_offsets"] != [0, 0]:
            places["a"]["saved_offsets"] = offset
            save_file(load_file(path), path, metadata | {"DCP_SHARDING_INFO": json.dumps(places)})
    (saved / "complete.json").unlink()
    checkpoint_module._seal(saved)
    with pytest.raises(EntasisError, match="parts"):
        load_checkpoint(saved)
