"""The transfer check: what a grid says of a rung, where the best rate goes, and a study that never repeats a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from entasis.errors import ConfigError, EntasisError
from entasis.report.scaling_schema import Rung, Transfer, TunedRung
from entasis.run.config import RunConfig, load_config, parse_config
from entasis.run.folder import RunFolder
from entasis.shape.budget import budget
from entasis.study.grids import move, tuned_rung
from entasis.study.rungs import rung
from entasis.study.transfer import transfer

MakeConfig = Callable[..., RunConfig]

_RATES = [1e-3, 2e-3, 4e-3, 8e-3]


def _tuned(width: int, *losses: list[float | None]) -> TunedRung:
    rung = Rung(width=width, shape={}, parameters=1, logit_divisor=1.0, block_rate=1.0)
    return tuned_rung("a", rung, dict(zip(_RATES, losses, strict=True)), 2.0)


def test_the_best_rate_is_that_of_the_lowest_mean_without_a_divergence() -> None:
    found = _tuned(32, [3.0, 3.11], [2.5, 2.6], [2.4, None], [2.5, 2.7])
    assert found["best"] == 2e-3
    assert found["best_by_seed"] == [4e-3, 2e-3], "a seed by itself knows nothing of another's divergence"
    assert not found["at_edge"]
    assert [point["mean"] for point in found["points"]] == pytest.approx([3.055, 2.55, None, 2.6])
    assert [point["not_worse"] for point in found["points"]] == [False, True, False, True]
    assert _tuned(32, [2.0, 2.0], [3.0, 3.0], [3.0, 3.0], [3.0, 3.0])["at_edge"]
    with pytest.raises(EntasisError, match="a at width 32 diverged at every rate"):
        _tuned(32, [1.0, None], [1.0, None], [1.0, None], [None, None])


def test_rates_within_the_noise_are_not_called_worse() -> None:
    found = _tuned(32, [3.0, 3.0, 3.0], [2.50, 2.52, 2.51], [2.51, 2.50, 2.53], [2.6, 2.62, 2.62])
    assert [point["not_worse"] for point in found["points"]] == [False, True, True, False]


def test_the_same_rate_costs_nothing() -> None:
    smaller = _tuned(32, [3.0, 3.0], [2.5, 2.4], [2.3, 2.5], [2.8, 2.8])
    larger = _tuned(64, [3.0, 3.0], [2.5, 2.4], [2.2, 2.3], [2.8, 2.8])
    found = move("a", smaller, larger)
    assert (found["verdict"], found["steps"], found["cost"]) == ("same rate", 0, 0.0)
    assert found["steps_by_seed"] == [0, 1]
    assert found["sentence"] == (
        "a, width 32 to 64: the best rate stays 4e-3; so it does with 1 of 2 seeds alone."
    )  # fmt: skip


def test_a_move_has_its_paired_cost() -> None:
    smaller = _tuned(32, [3.0] * 3, [2.6] * 3, [2.5] * 3, [2.8] * 3)
    larger = _tuned(64, [2.9] * 3, [2.30, 2.31, 2.29], [2.40, 2.42, 2.38], [2.9] * 3)
    found = move("a", smaller, larger)
    assert (found["verdict"], found["steps"], found["steps_by_seed"]) == ("moved", -1, [-1] * 3)
    assert found["pairs"] == pytest.approx([0.10, 0.11, 0.09])
    # sd 0.01, three pairs: 4.3027 times 0.01 / sqrt(3)
    assert (found["low"], found["high"]) == pytest.approx((0.1 - 0.02484, 0.1 + 0.02484), abs=1e-5)
    assert "moves from 4e-3 to 2e-3, 1 grid step down; the rate of width 32 costs 0.1000" in found["sentence"]
    assert "interval +0.0752 to +0.1248" in found["sentence"]


def test_a_cost_within_the_noise_is_not_shown() -> None:
    smaller = _tuned(32, [3.0] * 3, [2.6] * 3, [2.5] * 3, [2.8] * 3)
    larger = _tuned(64, [2.9] * 3, [2.30, 2.31, 2.29], [2.32, 2.29, 2.33], [2.9] * 3)
    found = move("a", smaller, larger)
    assert found["verdict"] == "moved, no cost shown"
    assert "not shown: the 95 % interval" in found["sentence"]
    assert found["cost"] is not None and found["cost"] > 0


def test_what_a_grid_cannot_say() -> None:
    inside = _tuned(32, [3.0] * 2, [2.5] * 2, [2.6] * 2, [2.8] * 2)
    edge = _tuned(64, [2.0, 2.1], [2.5] * 2, [2.6] * 2, [2.8] * 2)
    found = move("a", inside, edge)
    assert found["verdict"] == "edge of the grid"
    assert "At width 64 the best rate is at the edge of the grid and may lie outside" in found["sentence"]
    assert "At width 64 and 64" in move("a", edge, edge)["sentence"]
    assert move("a", edge, edge)["verdict"] == "edge of the grid", "the same edge twice is no transfer"

    diverged = _tuned(64, [3.0] * 2, [2.5, None], [2.6] * 2, [2.8] * 2)
    found = move("a", inside, diverged)
    assert (found["verdict"], found["cost"], found["pairs"]) == ("diverged", None, [pytest.approx(-0.1), None])
    assert "at the rate of width 32, width 64 diverges" in found["sentence"]

    one = move("a", _tuned(32, [3.0], [2.5], [2.6], [2.8]), _tuned(64, [3.0], [2.5], [2.4], [2.8]))
    assert (one["verdict"], one["low"]) == ("one seed", None)


# --- the study --------------------------------------------------------------------------------------------------------

_TRANSFER = {"widths": [16, 32], "learning_rate": [1e-3, 3e-3, 9e-3], "seeds": [0, 1]}


def _study(settings: dict[str, Any], out: Path, changes: dict[str, Any] | None = None) -> RunConfig:
    data: dict[str, Any] = {
        **settings,
        "shape": {"family": "uniform", "layers": 3, "width": 16, "heads": 2},
        "train": {**settings["train"], "steps": 2, "evaluate_every": 2, "keep_checkpoints": 1},
        "out": str(out),
        "compare": {"shapes": {"uniform": {}, "bowtie": {"family": "bowtie", "multiple": 4, "turn": 2}}},
        "transfer": _TRANSFER,
    }
    for section, values in (changes or {}).items():
        data[section] = {**data.get(section, {}), **values}
    return parse_config(data)


def _run(config: RunConfig) -> Transfer:
    return transfer(config, Console(quiet=True), command="entasis transfer c.yaml")


@pytest.fixture(scope="module")
def finished(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Transfer]:
    config = _study(settings, tmp_path_factory.mktemp("study"), {"transfer": {"base_width": 16}})
    return config, _run(config)


def test_every_family_width_rate_and_seed_has_its_run(finished: tuple[RunConfig, Transfer]) -> None:
    config, results = finished
    folders = sorted(path.name for path in (Path(config.out) / "trials").iterdir())
    assert len(folders) == 2 * 2 * 3 * 2
    assert "bowtie-width32-rate0.009-seed1" in folders
    run = RunFolder(Path(config.out) / "trials" / "bowtie-width32-rate0.009-seed1")
    saved = run.read_config()
    assert (saved.shape["width"], saved.optimizer.learning_rate, saved.train.seed) == (32, 0.009, 1)
    assert (saved.model.logit_divisor, saved.optimizer.block_rate) == (2.0, 0.5), "tied to width 16"
    assert (saved.compare, saved.transfer) == (None, None)
    point = results["families"]["bowtie"]["rungs"][1]["points"][2]
    assert point["losses"][1] == run.read_metrics()[-1]["val_loss"]
    assert [each["from_width"] for each in results["families"]["uniform"]["moves"]] == [16]
    assert json.loads((Path(config.out) / "results.json").read_text(encoding="utf-8")) == json.loads(
        json.dumps(results)
    )


def test_finished_runs_are_not_trained_again(
    finished: tuple[RunConfig, Transfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, results = finished
    monkeypatch.setattr(RunFolder, "append_metrics", lambda *_: pytest.fail("a step was taken"))
    again = _run(config)
    assert again["families"] == results["families"]


def test_a_longer_study_does_not_mix_with_a_shorter(
    finished: tuple[RunConfig, Transfer], settings: dict[str, Any]
) -> None:
    config, _ = finished
    longer = _study(settings, Path(config.out), {"train": {"steps": 3}, "transfer": {"base_width": 16}})
    with pytest.raises(ConfigError, match=r"train\.steps: the study has a run with 2"):
        _run(longer)


def test_a_rate_that_diverges_is_kept_as_such_and_not_tried_again(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"learning_rate": [1e-3, 3e-3, 1e30], "seeds": [0]}
    config = _study(settings, tmp_path, {"transfer": changes, "compare": {"shapes": {"uniform": {}}}})
    results = _run(config)
    assert [point["mean"] is None for point in results["families"]["uniform"]["rungs"][0]["points"]] == [
        False,
        False,
        True,
    ]
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")
    monkeypatch.setattr(RunFolder, "append_metrics", lambda *_: pytest.fail("a step was taken"))
    assert _run(config)["families"] == results["families"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"widths": [32, 16]}, r"transfer: widths \[32, 16\]: expected to rise"),
        ({"widths": [16]}, r"transfer\.widths"),
        ({"learning_rate": [1e-3, 3e-3, 2e-3]}, "learning_rate .*expected to rise"),
        ({"learning_rate": [1e-3, 3e-3]}, r"transfer\.learning_rate"),
        ({"seeds": [1, 1]}, r"seeds \[1, 1\] repeat"),
        ({"width": [1]}, r"transfer\.width: unknown setting"),
    ],
)
def test_wrong_sections_are_refused_in_one_line(
    settings: dict[str, Any], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        _study(settings, tmp_path, {"transfer": changes})
    assert "\n" not in str(caught.value)


def test_a_width_without_a_shape_is_refused_before_any_run(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"transfer\.widths, uniform: width 33: shape: layer 1: 2 heads"):
        _run(_study(settings, tmp_path / "s", {"transfer": {"widths": [16, 33]}}))
    assert not (tmp_path / "s").exists()


def test_one_shape_alone_and_none_at_all(make_config: MakeConfig, tmp_path: Path) -> None:
    shape = {"family": "uniform", "layers": 1, "width": 16, "heads": 2}
    section = {"widths": [16, 32], "learning_rate": [1e-3, 2e-3, 4e-3], "seeds": [0]}
    config = make_config({"shape": shape, "transfer": section, "train.steps": 1}, out=tmp_path / "s")
    assert list(_run(config)["families"]) == ["uniform"]
    with pytest.raises(ConfigError, match="transfer: missing"):
        _run(make_config({"shape": shape}))


@pytest.mark.parametrize(("name", "divisors"), [("transfer", [4.0, 8.0, 16.0]), ("transfer-published", [8.0] * 3)])
def test_the_studies_are_ladders(name: str, divisors: list[float]) -> None:
    """Every rung of both configurations is a shape, within a hundredth of the uniform one's effective parameters."""
    config = load_config(Path(__file__).parents[2] / "configs" / "studies" / f"{name}.yaml")
    assert config.transfer is not None
    block = config.block(4096)
    rungs = {
        family: [rung(each, width, config.transfer.base_width) for width in config.transfer.widths]
        for family, each in ((family, config.for_shape(family)) for family in ("uniform", "bowtie"))
    }
    for uniform, bowtie, divisor in zip(rungs["uniform"], rungs["bowtie"], divisors, strict=True):
        assert uniform.model.logit_divisor == bowtie.model.logit_divisor == pytest.approx(divisor)
        assert uniform.optimizer.block_rate == pytest.approx(1 / divisor)
        counts = [budget(each.design(4096).shape, block).effective_parameters for each in (uniform, bowtie)]
        assert counts[1] == pytest.approx(counts[0], rel=0.01)
