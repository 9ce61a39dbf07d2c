"""Opening a run again: the same model, or one line that says why not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from entasis.data.dataset import TokenData
from entasis.errors import EntasisError
from entasis.model.transformer import Transformer
from entasis.run.checkpoint import Checkpoint, load_newest
from entasis.run.config import RunConfig, parse_config
from entasis.run.load import load_run, restore_model
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import Shape
from entasis.train.loop import train


@pytest.fixture(scope="module")
def trained(settings: dict[str, Any], quiet: Console, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained")
    train(parse_config({**settings, "out": str(path), "train": {**settings["train"], "steps": 4}}), quiet)
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


@pytest.fixture
def saved(run: Path) -> Checkpoint:
    checkpoint = load_newest(run / "checkpoints", pytest.fail)
    assert checkpoint is not None
    return checkpoint


def test_a_run_opens_with_its_weights_and_tokenizer(run: Path, saved: Checkpoint, small_data: Path) -> None:
    shutil.move(run, run.with_name("moved"))
    loaded = load_run(run.with_name("moved"), pytest.fail)
    assert loaded.step == 4
    assert not loaded.model.training
    assert {name: tensor.tolist() for name, tensor in loaded.model.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in saved.model.items()
    }
    assert loaded.tokenizer.fingerprint == TokenData.open(small_data).tokenizer().fingerprint


def test_a_damaged_newest_checkpoint_is_said(run: Path) -> None:
    (run / "checkpoints" / "step-00000004" / "model.safetensors").write_bytes(b"")
    said: list[str] = []
    assert load_run(run, said.append).step == 3
    assert len(said) == 1
    assert "step-00000004" in said[0]


def test_no_run_and_no_checkpoint_give_one_line(run: Path, tmp_path: Path) -> None:
    with pytest.raises(EntasisError, match=r"nothing: not a run folder \(no shape\.json\)"):
        load_run(tmp_path / "nothing")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(EntasisError, match="no checkpoint yet"):
        load_run(run)


def test_a_checkpoint_beside_an_edited_shape_is_refused(run: Path) -> None:
    file = run / "shape.json"
    shape = json.loads(file.read_text(encoding="utf-8"))
    shape["layers"][2] |= {"heads": 3, "kv_heads": 3, "head_dim": 8}  # 2 × 12 = 3 × 8: all tensors fit
    file.write_text(json.dumps(shape), encoding="utf-8")
    with pytest.raises(EntasisError, match=r"step 4 has another shape: layer 3 was .*heads=2.* and is now .*heads=3"):
        load_run(run)


def _changed(shape: Shape, **fields: Any) -> Shape:
    data = shape.to_dict()
    data["layers"][1] |= fields
    return Shape.from_dict(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda shape: _changed(shape, window=8), "layer 2"),
        (lambda shape: Shape(shape.layers[:2], 24), "3 layers instead of 2"),
        (lambda shape: Shape(shape.layers, 24, 16), "unembed_width None instead of 24 and 16"),
    ],
)
def test_another_shape_is_refused(change: Callable[[Shape], Shape], message: str, saved: Checkpoint) -> None:
    shape = Shape.from_dict(saved.state["shape"])
    try:
        model = Transformer(change(shape), ModelConfig.from_dict(saved.state["block"]))
    except EntasisError:  # windows cannot be built yet; the comparison of records does not need them
        model = Transformer(shape, ModelConfig.from_dict(saved.state["block"]))
        model.shape = change(shape)
    with pytest.raises(EntasisError, match=message):
        restore_model(model, saved)


def test_another_block_is_refused_although_all_tensors_fit(saved: Checkpoint) -> None:
    block = ModelConfig.from_dict({**saved.state["block"], "rotary_theta": 500.0})
    with pytest.raises(EntasisError, match=r"another block: rotary_theta 10000\.0 instead of 500\.0"):
        restore_model(Transformer(Shape.from_dict(saved.state["shape"]), block), saved)


def test_weights_that_do_not_fit_are_refused(saved: Checkpoint, make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    model = Transformer(config.design(257).shape, config.block(257), seed=5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    name = "layers.1.attention.norm.weight"
    assert name in saved.model
    for broken, message in (
        ({key: value for key, value in saved.model.items() if key != name}, "other weights"),
        ({**saved.model, "_orig_mod.more": torch.zeros(2)}, "other weights"),
        ({**saved.model, name: saved.model[name].bfloat16()}, f"{name}: stored as torch.bfloat16"),
        ({**saved.model, name: saved.model[name][:-1]}, f"{name}: stored as torch.float32 \\(15,\\)"),
    ):
        with pytest.raises(EntasisError, match=message):
            restore_model(model, Checkpoint(saved.step, broken, saved.optimizer, saved.state))
    assert before.keys() == saved.model.keys()
    restore_model(model, saved)
    assert all(torch.equal(tensor, saved.model[key]) for key, tensor in model.state_dict().items())
    assert any(not torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
