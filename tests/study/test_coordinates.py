"""The coordinate check: what it measures, that it trains as training does, and what it finds where theory knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from entasis.data.dataset import TokenData
from entasis.errors import ConfigError
from entasis.model.device import choose_computation
from entasis.model.transformer import Transformer
from entasis.report.scaling_schema import Coordinates, Quantity
from entasis.run.checkpoint import NonFiniteError
from entasis.run.config import RunConfig
from entasis.run.load import load_run
from entasis.study.coordinates import _activations, _Place, _probe, coordinates
from entasis.train.loop import train

MakeConfig = Callable[..., RunConfig]

_UNIFORM = {"family": "uniform", "layers": 2, "width": 16, "heads": 2}
_BOWTIE = {"family": "bowtie", "layers": 4, "width": 32, "heads": 2, "multiple": 4, "turn": 3}
_MUP = {
    "shape": _UNIFORM,
    "model.attention_scale": "linear",
    "model.embedding_multiplier": 12.0,
    "model.residual_multiplier": 0.22,
    "model.initialisation": "mup",
    "optimizer.learning_rate": 0.01,
}


def _check(config: RunConfig, folder: Path, **changes: Any) -> Coordinates:
    arguments = {"widths": [16, 32, 64], "steps": 2, "seeds": 2, **changes}
    return coordinates(config, Console(quiet=True), command="entasis coordinates", folder=folder, **arguments)


def _named(results: Coordinates, name: str) -> Quantity:
    return next(quantity for quantity in results["quantities"] if quantity["name"] == name)


def test_sizes_and_changes_are_those_of_a_plain_forward_pass(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config({"shape": _UNIFORM, "model.embedding_multiplier": 3.0, "train.seed": 5})
    results = _check(config, tmp_path / "c", seeds=1)
    data = TokenData.open(Path(config.data.path))
    tokens = torch.from_numpy(_probe(config, data).tokens)
    model = Transformer(config.design(data.vocab_size).shape, config.block(data.vocab_size), seed=5)
    attention = next(iter(model.blocks()))[1].attention
    assert attention is not None
    with torch.no_grad():
        expected = {
            "embedding": 3 * model.embed(tokens),
            "logits": model(tokens),
            "attention 1": attention(3 * model.embed(tokens), model._rotations(torch.arange(16).unsqueeze(0))[8]),
        }
    for name, state in expected.items():
        assert _named(results, name)["sizes"][0][0][0] == pytest.approx(state.abs().mean().item(), rel=1e-6), name
    assert [len(seed) for seed in _named(results, "logits")["changes"][0]] == [2]
    assert all(value > 0 for value in _named(results, "logits")["changes"][0][0])
    assert all(not module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("causal", [True, False])
def test_it_trains_as_training_does(make_config: MakeConfig, tmp_path: Path, causal: bool) -> None:
    """The logits after the last step are those of a run with a constant rate and no warm-up."""
    config = make_config(
        {
            "shape": _UNIFORM,
            "model.causal": causal,
            "train.steps": 3,
            "schedule": {"name": "constant", "warmup_steps": 0},
            "optimizer.block_rate": 0.5,
        },
        out=tmp_path / "run",
    )
    train(config, Console(quiet=True))
    results = _check(config, tmp_path / "c", steps=3, seeds=1)
    run = load_run(tmp_path / "run", report=pytest.fail)
    computation = choose_computation("cpu", "fp32", 1)
    probe = _probe(config, TokenData.open(Path(config.data.path)))
    trained = _activations(run.model, probe, computation)
    places: dict[str, _Place] = {"logits": ("logits", None), "stream after 1": ("stream", 1), "MLP 2": ("mlp", 2)}
    for name, place in places.items():
        assert _named(results, name)["sizes"][0][0][-1] == trained[place].abs().mean().item()


def test_published_multipliers_do_not_transfer_and_those_that_follow_the_width_do(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """At the start, with the same spread at every width, attention grows as width and the MLP faster; tied, neither."""
    published = _check(make_config(_MUP), tmp_path / "p", steps=1)
    tied = _check(make_config(_MUP), tmp_path / "t", steps=1, base_width=16)
    for name, least in (("attention 1", 0.7), ("MLP 2", 1.0)):
        grows, stays = _named(published, name)["start"], _named(tied, name)["start"]
        assert grows["mean"] is not None and grows["mean"] > least, name
        assert stays["mean"] is not None and abs(stays["mean"]) < 0.2, name
    for results, change in ((published, 0.5), (tied, 0.0)):
        slope = _named(results, "attention 1")["change"]["mean"]
        assert slope is not None and (slope > change if change else abs(slope) < 0.5)
    assert _named(tied, "logits")["start"]["mean"] == pytest.approx(-0.5, abs=0.15), "a random head's logits"
    assert [each["logit_divisor"] for each in tied["rungs"]] == [1, 2, 4]
    assert [each["block_rate"] for each in published["rungs"]] == [1, 1, 1]


def test_a_bowtie_is_measured_at_each_layers_own_width(make_config: MakeConfig, tmp_path: Path) -> None:
    results = _check(make_config({"shape": _BOWTIE}), tmp_path, widths=[32, 64], steps=1)
    layers = [[layer["width"] for layer in each["shape"]["layers"]] for each in results["rungs"]]
    for number in range(1, 5):
        for kind in ("attention", "MLP", "stream after"):
            assert _named(results, f"{kind} {number}")["widths"] == [each[number - 1] for each in layers]
    assert layers[0][0] > 32 > layers[0][2]
    assert _named(results, "embedding")["widths"] == _named(results, "logits")["widths"] == [32, 64]
    shown = {quantity["layer"] for quantity in results["quantities"] if quantity["shown"]}
    assert shown == {None, 1, 3, 4}, "the first, the narrowest, the last"


def test_experts_and_layers_without_attention(make_config: MakeConfig, tmp_path: Path) -> None:
    experts = {**_UNIFORM, "experts": 3, "experts_per_token": 2, "expert_hidden": 8}
    results = _check(make_config({"shape": experts}), tmp_path, widths=[16, 32], steps=1)
    names = [quantity["name"] for quantity in results["quantities"]]
    expected = [f"{kind} {number}" for number in (1, 2) for kind in ("attention", "MLP", "stream after")]
    assert names == ["embedding", *expected, "logits"]


def test_another_check_is_not_written_over(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config({"shape": _UNIFORM})
    _check(config, tmp_path / "c", widths=[16, 32], steps=1, seeds=1)
    with pytest.raises(ConfigError, match=r"^--out: .* holds the results of another check \('entasis coordinates'\)"):
        coordinates(
            config,
            Console(quiet=True),
            command="entasis coordinates x",
            folder=tmp_path / "c",
            widths=[16, 32],
            steps=1,
            seeds=1,
        )


def test_results_are_written_whole_and_again(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config({"shape": _UNIFORM})
    first = _check(config, tmp_path / "c")
    written = json.loads((tmp_path / "c" / "results.json").read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(first))
    assert "<html" in (tmp_path / "c" / "report.html").read_text(encoding="utf-8")
    again = _check(config, tmp_path / "c")
    assert {**again, "created": ""} == {**first, "created": ""}
    assert [len(line) > 0 for line in first["summary"]] == [True] * 3
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [".lock", "report.html", "results.json"]


def test_what_goes_wrong_is_one_line_and_leaves_no_results(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"width 16, seed 0, step \d: gradient|width 16, seed 0: an activation"):
        _check(make_config({"shape": _UNIFORM, "optimizer.learning_rate": 1e30}), tmp_path / "c", steps=4)
    assert not (tmp_path / "c" / "results.json").exists()
    with pytest.raises(ConfigError, match="family explicit has no setting `width`"):
        _check(make_config(), tmp_path / "c")
    with pytest.raises(ConfigError, match="--steps 0"):
        _check(make_config({"shape": _UNIFORM}), tmp_path / "c", steps=0)
    (tmp_path / "r" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds a run"):
        _check(make_config({"shape": _UNIFORM}), tmp_path / "r")
