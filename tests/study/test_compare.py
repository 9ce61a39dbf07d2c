"""A comparison: paired, matched, tuned, never repeating what is done, and going on after a kill."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

import pytest
from rich.console import Console

from entasis.errors import ConfigError, EntasisError
from entasis.report.schema import Comparison
from entasis.run.checkpoint import NonFiniteError
from entasis.run.config import RunConfig, parse_config
from entasis.run.folder import RunFolder
from entasis.shape.budget import budget
from entasis.shape.match import MATCH_FIELDS
from entasis.study import compare as module
from entasis.study import workers
from entasis.study.compare import compare
from entasis.train import loop
from entasis.train.interrupt import Interrupted

MakeConfig = Callable[..., RunConfig]

_UNIFORM = {"family": "uniform", "layers": 2, "width": 16, "heads": 4}
_PRISM = {"family": "prism", "heads": [2, 4]}
_COMPARE: dict[str, Any] = {
    "shapes": {"uniform": {"family": "uniform"}, "prism": _PRISM, "twin": {}},
    "seeds": [0, 1, 2],
    "contrasts": {"prism-straight": {"of": ["prism"], "against": ["uniform", "twin"]}},
    "prompt": "The sea",
}


def _study(settings: dict[str, Any], out: Path, changes: dict[str, Any] | None = None) -> RunConfig:
    data: dict[str, Any] = {
        **settings,
        "shape": _UNIFORM,
        "train": {**settings["train"], "steps": 4, "evaluate_every": 2, "keep_checkpoints": 1},
        "out": str(out),
        "compare": _COMPARE,
    }
    for section, values in (changes or {}).items():
        none: dict[str, Any] = {"contrasts": {}} if "shapes" in values else {}  # those above are of other shapes
        data[section] = {**data.get(section, {}), **none, **values}
    return parse_config(data)


def _run(config: RunConfig, *, allow_unequal: bool = False) -> Comparison:
    return compare(config, Console(quiet=True), command="entasis compare c.yaml", allow_unequal=allow_unequal)


@pytest.fixture(scope="module")
def finished(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Comparison]:
    config = _study(settings, tmp_path_factory.mktemp("study"))
    return config, _run(config)


@pytest.fixture
def config(settings: dict[str, Any], tmp_path: Path) -> RunConfig:
    """A study of two shapes and two seeds, not begun."""
    shapes = {"uniform": {}, "prism": _PRISM}
    return _study(settings, tmp_path / "study", {"compare": {"shapes": shapes, "seeds": [0, 1]}})


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the run folders for which a step is taken, in order."""
    steps: list[str] = []
    original = RunFolder.append_metrics

    def append(self: RunFolder, record: Any) -> None:
        if self.path.name not in steps[-1:]:
            steps.append(self.path.name)
        original(self, record)

    monkeypatch.setattr(RunFolder, "append_metrics", append)
    return steps


def _comparable(results: Comparison) -> dict[str, Any]:
    """Results without what is measured or says when and where."""
    data = json.loads(json.dumps(results))
    for name in ("created", "config", "environment"):
        del data[name]
    for shape in data["shapes"].values():
        del shape["tokens_per_second_ratio"]
        for run in shape["runs"]:
            del run["tokens_per_second"]
    return dict(data)


# --- results ----------------------------------------------------------------------------------------------------------


def _assert_fits(value: Any, annotation: Any, where: str) -> None:
    """Plain data against the schema's annotations, every key there and none left over."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return
    if is_typeddict(annotation):
        hints = get_type_hints(annotation)
        assert isinstance(value, dict), where
        assert value.keys() == hints.keys(), where
        for name, hint in hints.items():
            _assert_fits(value[name], hint, f"{where}.{name}")
    elif origin is list:
        assert isinstance(value, list), where
        for number, each in enumerate(value):
            _assert_fits(each, arguments[0], f"{where}[{number}]")
    elif origin is dict:
        assert isinstance(value, dict), where
        for name, each in value.items():
            _assert_fits(name, arguments[0], where)
            _assert_fits(each, arguments[1], f"{where}.{name}")
    elif arguments and origin is not None and "Union" in str(origin):
        assert type(value) in arguments or any(_fits(value, each) for each in arguments), where
    elif arguments:  # Literal
        assert value in arguments, where
    elif annotation is float:
        assert isinstance(value, float | int), where
        assert not isinstance(value, bool) and math.isfinite(value), where
    else:
        assert type(value) is annotation, where


def _fits(value: Any, annotation: Any) -> bool:
    if annotation is type(None):
        return value is None
    try:
        _assert_fits(value, annotation, "")
    except AssertionError:
        return False
    return True


def test_results_are_as_the_schema_says(finished: tuple[RunConfig, Comparison]) -> None:
    config, results = finished
    written = json.loads((Path(config.out) / "results.json").read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(results))
    _assert_fits(written, Comparison, "results")
    assert not _fits({**written, "more": 1}, Comparison)
    assert not _fits({**written, "seeds": [0.5]}, Comparison)


def test_a_comparison_folder_holds_what_it_promises(finished: tuple[RunConfig, Comparison]) -> None:
    config, results = finished
    folder = Path(config.out)
    assert {"results.json", "report.html", "runs"} <= {path.name for path in folder.iterdir()}
    names = {f"{shape}-seed{seed}" for shape in ("uniform", "prism", "twin") for seed in (0, 1, 2)}
    assert {path.name for path in (folder / "runs").iterdir()} == names
    assert {run["folder"] for shape in results["shapes"].values() for run in shape["runs"]} == {
        f"runs/{name}" for name in names
    }


def test_one_shape_under_two_names_differs_by_exactly_zero(finished: tuple[RunConfig, Comparison]) -> None:
    _, results = finished
    assert results["reference"] == "uniform"
    uniform, twin = results["shapes"]["uniform"], results["shapes"]["twin"]
    assert uniform["difference"] is None
    assert twin["difference"] is not None
    assert twin["difference"]["pairs"] == [0.0, 0.0, 0.0]
    assert twin["difference"]["mean"] == 0
    assert twin["difference"]["verdict"] == "identical"
    for left, right in zip(uniform["runs"], twin["runs"], strict=True):
        assert left["curve"] == right["curve"]
        assert left["train_curve"] == right["train_curve"]
    assert uniform["sample"] == twin["sample"]
    assert uniform["sample"], "what follows the prompt, without it"
    assert not uniform["sample"].startswith("The sea")
    prism = results["shapes"]["prism"]["difference"]
    assert prism is not None
    assert prism["verdict"] != "identical"
    assert all(pair != 0 for pair in prism["pairs"])


def test_numbers_of_the_results(finished: tuple[RunConfig, Comparison]) -> None:
    config, results = finished
    shape = results["shapes"]["uniform"]
    assert results["epochs"] == pytest.approx(4 * 4 / 20)
    assert results["train_tokens_per_run"] == 4 * 64
    assert results["exploratory"] is True
    assert shape["tokens_per_parameter"] == pytest.approx(
        256 / (shape["budget"]["parameters"] - shape["budget"]["embedding_parameters"])
    )
    for seed, run in enumerate(shape["runs"]):
        records = RunFolder(Path(config.out) / run["folder"]).read_metrics()
        assert run["seed"] == seed
        assert [point["step"] for point in run["curve"]] == [2, 4]
        assert [point["tokens"] for point in run["curve"]] == [128, 256]
        assert run["final_val_loss"] == records[-1]["val_loss"]
        assert run["best_val_loss"] == min(point["val_loss"] for point in run["curve"])
        bytes_per_token = results["data"]["held_out_bytes_per_token"]
        assert bytes_per_token is not None
        bits = run["final_val_loss"] / math.log(2) / bytes_per_token
        assert run["final_bits_per_byte"] == pytest.approx(bits)
        assert [point["step"] for point in run["train_curve"]] == [1, 2, 3, 4]
    assert shape["mean_val_loss"] == pytest.approx(sum(run["final_val_loss"] for run in shape["runs"]) / 3)
    assert shape["ratio"]["effective_parameters"] == 1
    assert shape["reach"]["steps"] == pytest.approx(4)
    assert shape["reach"]["flops_ratio"] == pytest.approx(1)
    assert shape["learning_rate"] == config.optimizer.learning_rate
    assert shape["tuning"] == []
    assert results["tune_seed"] is None


def test_seeds_are_paired_by_their_batches(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, trained: list[str]
) -> None:
    read: dict[str, list[Any]] = {}
    original = loop._micro_batches

    def watched(batch: Any, sequences: int) -> Any:
        read.setdefault(folder, []).append(batch.tokens.tolist())
        return original(batch, sequences)

    folder = ""
    train = vars(workers)["train"]

    def named(run: RunConfig, *args: Any, **kwargs: Any) -> None:
        nonlocal folder
        folder = Path(run.out).name
        train(run, *args, **kwargs)

    monkeypatch.setattr(loop, "_micro_batches", watched)
    monkeypatch.setattr(workers, "train", named)
    _run(config)
    assert trained == ["uniform-seed0", "prism-seed0", "uniform-seed1", "prism-seed1"], "shapes by turns"
    for seed in (0, 1):
        assert read[f"uniform-seed{seed}"] == read[f"prism-seed{seed}"]
    assert read["uniform-seed0"] != read["uniform-seed1"]


def test_a_contrast_is_the_mean_of_its_groups_seed_by_seed(finished: tuple[RunConfig, Comparison]) -> None:
    (contrast,) = finished[1]["contrasts"]
    assert (contrast["name"], contrast["of"], contrast["against"]) == ("prism-straight", ["prism"], ["uniform", "twin"])
    finals = {name: [run["final_val_loss"] for run in shape["runs"]] for name, shape in finished[1]["shapes"].items()}
    expected = [
        prism - (uniform + twin) / 2
        for prism, uniform, twin in zip(finals["prism"], finals["uniform"], finals["twin"], strict=True)
    ]
    assert contrast["difference"]["pairs"] == pytest.approx(expected, rel=1e-12)
    assert "the mean of uniform and twin" in contrast["difference"]["sentence"]


def test_a_shape_has_settings_of_the_model_of_its_own(settings: dict[str, Any], tmp_path: Path) -> None:
    bowtie = {"family": "bowtie", "layers": 3, "width": 16, "heads": 2, "turn": 2, "multiple": 4}
    shapes = {"carry": bowtie, "zero": {**bowtie, "model": {"resize": "zero"}}}
    config = _study(settings, tmp_path / "study", {"compare": {"shapes": shapes, "seeds": [0, 1]}})
    results = _run(config, allow_unequal=True)
    assert results["shapes"]["zero"]["model"] == {"resize": "zero"}
    assert results["shapes"]["carry"]["model"] == {}
    assert RunFolder(tmp_path / "study/runs/zero-seed0").read_config().model.resize == "zero"
    assert RunFolder(tmp_path / "study/runs/carry-seed0").read_config().model.resize == "carry"
    assert results["shapes"]["zero"]["difference"]
    assert results["shapes"]["zero"]["difference"]["verdict"] != "identical"
    assert "zero: resize zero" in (tmp_path / "study/report.html").read_text()


# --- nothing is repeated ----------------------------------------------------------------------------------------------


def test_finished_runs_are_not_repeated(
    finished: tuple[RunConfig, Comparison], tmp_path: Path, settings: dict[str, Any], trained: list[str]
) -> None:
    shutil.copytree(finished[0].out, tmp_path / "study")
    config = _study(settings, tmp_path / "study")
    files = {
        path: path.read_bytes()
        for path in (tmp_path / "study" / "runs").rglob("*")
        if path.is_file() and path.name not in {".lock", "log.txt"}
    }
    assert _comparable(_run(config)) == _comparable(finished[1])
    assert trained == []
    assert {path: path.read_bytes() for path in files} == files


def test_a_seed_added_later_trains_only_that_seed(
    finished: tuple[RunConfig, Comparison], tmp_path: Path, settings: dict[str, Any], trained: list[str]
) -> None:
    shutil.copytree(finished[0].out, tmp_path / "study")
    results = _run(_study(settings, tmp_path / "study", {"compare": {"seeds": [0, 1, 2, 5]}}))
    assert trained == ["uniform-seed5", "prism-seed5", "twin-seed5"]
    assert results["seeds"] == [0, 1, 2, 5]
    before = finished[1]["shapes"]["prism"]["runs"]
    assert [run["curve"] for run in results["shapes"]["prism"]["runs"][:3]] == [run["curve"] for run in before]


def test_a_shape_added_later_trains_only_that_shape(
    finished: tuple[RunConfig, Comparison], tmp_path: Path, settings: dict[str, Any], trained: list[str]
) -> None:
    shutil.copytree(finished[0].out, tmp_path / "study")
    shapes = {**_COMPARE["shapes"], "wide-heads": {"heads": 2}}
    results = _run(_study(settings, tmp_path / "study", {"compare": {"shapes": shapes}}))
    assert trained == [f"wide-heads-seed{seed}" for seed in (0, 1, 2)]
    assert list(results["shapes"]) == ["uniform", "prism", "twin", "wide-heads"]


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [("train", "steps", 6), ("train", "steps", 2), ("train", "evaluate_every", 1), ("train", "evaluate_tokens", 32)],
)
def test_runs_trained_or_evaluated_otherwise_are_not_compared(
    section: str,
    name: str,
    value: int,
    finished: tuple[RunConfig, Comparison],
    tmp_path: Path,
    settings: dict[str, Any],
    trained: list[str],
) -> None:
    shutil.copytree(finished[0].out, tmp_path / "study")
    with pytest.raises(ConfigError, match=rf"^{section}\.{name}: .*cannot be compared"):
        _run(_study(settings, tmp_path / "study", {section: {name: value}}))
    assert trained == []


def test_another_rate_is_refused(
    finished: tuple[RunConfig, Comparison], tmp_path: Path, settings: dict[str, Any], trained: list[str]
) -> None:
    shutil.copytree(finished[0].out, tmp_path / "study")
    with pytest.raises(ConfigError, match=r"^optimizer\.learning_rate: .*0\.003.*0\.001"):
        _run(_study(settings, tmp_path / "study", {"optimizer": {"learning_rate": 0.001}}))
    assert trained == []


# --- stopped and started again ----------------------------------------------------------------------------------------


def test_a_killed_study_goes_on(
    config: RunConfig, in_child: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Killed again and again: within a run, in its last step, and in the first one of the next."""
    whole = _run(config.model_copy(update={"out": str(tmp_path / "whole")}))
    original = vars(loop)["learning_rate"]
    for step in (3, 4, 5, 2, 8):
        calls = 0

        def share(*args: Any, step: int = step) -> Any:
            nonlocal calls
            calls += 1
            if calls == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "learning_rate", share)
            assert in_child(lambda: _run(config)) == -signal.SIGKILL
        assert not (Path(config.out) / "results.json").exists()
    assert _comparable(_run(config)) == _comparable(whole)


def test_a_study_killed_while_it_writes_its_results_goes_on(
    config: RunConfig, in_child: Callable[..., int], monkeypatch: pytest.MonkeyPatch, trained: list[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_report", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert in_child(lambda: _run(config)) == -signal.SIGKILL
    _run(config)
    assert trained == []
    assert (Path(config.out) / "report.html").exists()


@pytest.mark.parametrize("step", [2, 4])
def test_a_signal_stops_the_study_also_at_the_end_of_a_run(
    step: int, config: RunConfig, monkeypatch: pytest.MonkeyPatch, trained: list[str]
) -> None:
    original = vars(loop)["learning_rate"]

    def share(config: RunConfig, at: int) -> Any:
        if at == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(config, at)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "learning_rate", share)
        with pytest.raises(Interrupted, match=f"step {step} of 4 is saved in .*uniform-seed0"):
            _run(config)
    assert trained == ["uniform-seed0"]


def test_a_second_process_is_refused(config: RunConfig) -> None:
    with (
        RunFolder(Path(config.out)).locked(),
        pytest.raises(EntasisError, match=f"process {os.getpid()} is working in this run folder"),
    ):
        _run(config)


def test_a_run_that_diverges_is_named(settings: dict[str, Any], tmp_path: Path) -> None:
    config = _study(
        settings,
        tmp_path / "study",
        {"optimizer": {"learning_rate": 1e38}, "schedule": {"name": "constant", "warmup_steps": 0}},
    )
    with pytest.raises(NonFiniteError, match=r"^uniform, seed 0 \(1/9\): step \d+: "):
        _run(config)


# --- matching ---------------------------------------------------------------------------------------------------------


def test_unequal_budgets_are_refused_with_the_numbers_and_allowed_on_demand(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    changes = {"compare": {"shapes": {"uniform": {}, "wide": {"width": 24}}, "seeds": [0]}}
    config = _study(settings, tmp_path / "study", changes)
    with pytest.raises(ConfigError) as caught:
        _run(config)
    line = str(caught.value)
    assert line.startswith("compare.match: wide has ")
    for entry in ("uniform", "wide"):
        design = config.for_shape(entry)
        counted = budget(design.design(257).shape, design.block(257))
        assert f"{counted.effective_parameters:,}" in line
    assert "effective_parameters" in line
    assert "tolerance 1.00%" in line
    assert "--allow-unequal" in line
    assert not Path(config.out).exists()
    results = _run(config, allow_unequal=True)
    assert results["unequal"] == ["wide"]


@pytest.mark.parametrize("by", ["effective", "parameters", "flops", "kv"])
def test_budgets_are_matched_by_what_is_asked(by: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Half the key/value heads: a smaller cache at any rate; by every measure outside a tolerance of nothing."""
    shapes = {"uniform": {}, "grouped": {"kv_heads": 2}}
    config = _study(settings, tmp_path / "s", {"compare": {"shapes": shapes, "match": {"by": by, "tolerance": 0.0}}})
    field = MATCH_FIELDS[by]
    with pytest.raises(ConfigError, match=rf"grouped has [\d,]+ {field} and uniform [\d,]+"):
        _run(config)


def test_the_reference_is_the_straight_one(settings: dict[str, Any], tmp_path: Path) -> None:
    for shapes, expected in (
        ({"prism": _PRISM, "uniform": _PRISM}, "uniform"),
        ({"prism": _PRISM, "straight": {}}, "straight"),
        ({"a": _PRISM, "b": {"family": "prism", "heads": [1, 4]}}, "a"),
    ):
        config = _study(settings, tmp_path, {"compare": {"shapes": shapes}})
        entries = [module._entry(name, config, 257) for name in shapes]
        assert module._reference(entries).name == expected


def test_nothing_to_compare(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"^compare: missing"):
        _run(make_config())


# --- tuning -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tuned(settings: dict[str, Any], tmp_path: Path) -> RunConfig:
    tune = {"learning_rate": [1e-5, 1e-2, 1e38], "seed": 7}
    shapes = {"uniform": {}, "prism": _PRISM}
    return _study(
        settings,
        tmp_path / "study",
        {
            "compare": {"shapes": shapes, "seeds": [0], "tune": tune},
            "schedule": {"name": "constant", "warmup_steps": 0},
            "optimizer": {"weight_decay": 0.0},
        },
    )


def test_each_shape_gets_its_best_rate_on_a_seed_of_its_own(tuned: RunConfig, trained: list[str]) -> None:
    results = _run(tuned)
    assert results["tune_seed"] == 7
    assert trained[-2:] == ["uniform-seed0", "prism-seed0"]
    folders = sorted(path.name for path in (Path(tuned.out) / "tuning").iterdir())
    assert folders == sorted(
        f"{name}-rate{rate}" for name in ("uniform", "prism") for rate in ("1e-05", "0.01", "1e+38")
    )
    for name, shape in results["shapes"].items():
        assert [point["learning_rate"] for point in shape["tuning"]] == [1e-5, 1e-2, 1e38]
        slow, good, diverged = (point["final_val_loss"] for point in shape["tuning"])
        assert diverged is None
        assert slow is not None and good is not None and good < slow
        assert shape["learning_rate"] == 1e-2
        assert shape["tuned_at_edge"] is False
        trial = RunFolder(Path(tuned.out) / "tuning" / f"{name}-rate0.01")
        assert trial.read_config().train.seed == 7
        assert good == trial.read_metrics()[-1]["val_loss"]
        assert RunFolder(Path(tuned.out) / shape["runs"][0]["folder"]).read_config().optimizer.learning_rate == 1e-2
    trained.clear()
    assert _comparable(_run(tuned)) == _comparable(results)
    assert trained == [], "neither what is finished nor what diverged is tried again"


def test_a_best_rate_at_the_edge_is_said(settings: dict[str, Any], tmp_path: Path) -> None:
    tune = {"learning_rate": [1e-5, 1e-2], "seed": 7}
    changes = {"compare": {"shapes": {"uniform": {}}, "seeds": [0], "tune": tune}}
    assert _run(_study(settings, tmp_path / "study", changes))["shapes"]["uniform"]["tuned_at_edge"] is True


def test_a_rate_added_later_tries_only_that_rate(
    tuned: RunConfig, settings: dict[str, Any], trained: list[str]
) -> None:
    _run(tuned)
    trained.clear()
    assert tuned.compare is not None and tuned.compare.tune is not None
    tune = tuned.compare.tune.model_copy(update={"learning_rate": [1e-5, 2e-5, 1e-2, 1e38]})
    more = tuned.model_copy(update={"compare": tuned.compare.model_copy(update={"tune": tune})})
    assert len(_run(more)["shapes"]["uniform"]["tuning"]) == 4
    assert trained == ["uniform-rate2e-05", "prism-rate2e-05"]


def test_a_shape_that_diverges_at_every_rate_is_told(
    settings: dict[str, Any], tmp_path: Path, trained: list[str]
) -> None:
    def study(**optimizer: Any) -> RunConfig:
        tune = {"learning_rate": [1e37, 1e38], "seed": 7}
        return _study(
            settings,
            tmp_path / "study",
            {
                "compare": {"shapes": {"uniform": {}}, "seeds": [0], "tune": tune},
                "schedule": {"name": "constant", "warmup_steps": 0},
                "optimizer": optimizer,
            },
        )

    for _ in range(2):
        with pytest.raises(EntasisError, match=r"^compare\.tune: uniform diverged at every rate; try lower ones"):
            _run(study(weight_decay=0.0))
    with pytest.raises(ConfigError, match=r"^optimizer\.clip: the run in .* was begun with 1\.0, and now it is 0\.5"):
        _run(study(weight_decay=0.0, clip=0.5))
