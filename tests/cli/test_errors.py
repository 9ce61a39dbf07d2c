"""Every wrong configuration ends in one line that names the field, with its exit status, and never in a traceback."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from entasis.__main__ import run


@dataclass(frozen=True)
class Said:
    """What a command left."""

    status: int
    out: str
    error: str


Command = Callable[..., Said]

_BASE: dict[str, Any] = {
    "data": {"path": "data"},
    "model": {"style": "llama", "context": 16},
    "shape": {"family": "uniform", "layers": 2, "width": 32, "heads": 4},
    "train": {"steps": 4, "batch_tokens": 128, "micro_batch": 2, "seed": 0, "evaluate_every": 2},
    "optimizer": {"name": "adamw", "learning_rate": 3e-3, "betas": [0.9, 0.95], "clip": 1.0},
    "schedule": {"name": "cosine", "warmup_steps": 2, "final_ratio": 0.1},
    "out": "run",
    "compare": {
        "shapes": {"uniform": {"family": "uniform"}, "prism": {"family": "prism", "heads": [2, 4]}},
        "seeds": [0, 1],
        "match": {"by": "effective", "tolerance": 0.01},
        "tune": {"learning_rate": [1e-3, 3e-3], "seed": 9},
    },
}


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Runs `entasis` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["entasis", *arguments])
        with pytest.raises(SystemExit) as caught:
            run()
        shown = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return Said(caught.value.code, shown.out, shown.err)

    return call


def _assert_one_line(said: Said, *, status: int, names: str) -> None:
    assert "Traceback" not in said.error + said.out
    lines = said.error.strip().splitlines()
    assert len(lines) == 1, said.error
    assert lines[0].startswith("error: ")
    assert not lines[0].startswith("error: unexpected "), lines[0]
    assert names in lines[0], lines[0]
    assert len(lines[0]) < 700
    assert said.status == status


def _with(name: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(_BASE)
    *sections, key = name.split("/")
    place = data
    for section in sections:
        place = place[section]
    place[key] = value
    return data


def _without(name: str) -> dict[str, Any]:
    data = copy.deepcopy(_BASE)
    *sections, key = name.split("/")
    place = data
    for section in sections:
        place = place[section]
    del place[key]
    return data


NAN, INF = float("nan"), float("inf")

_VALUES: list[tuple[str, Any, str]] = [
    # types
    ("train/steps", "many", "train.steps"),
    ("train/steps", 4.5, "train.steps"),
    ("train/steps", True, "train.steps"),
    ("train/steps", [4], "train.steps"),
    ("train/steps", {"a": 1}, "train.steps"),
    ("train/steps", None, "train.steps"),
    ("train/threads", "some", "train.threads"),
    ("train/threads", 1.5, "train.threads"),
    ("train/compile", "yes please", "train.compile"),
    ("train/compile", 1, "train.compile"),
    ("train/seed", "0", "train.seed"),
    ("train", 3, "train"),
    ("train", [1, 2], "train"),
    ("train", None, "train"),
    ("data", "data", "data"),
    ("data/path", 3, "data.path"),
    ("data/path", "", "data.path"),
    ("data/document_mask", "on", "data.document_mask"),
    ("model/style", 2, "model.style"),
    ("model/bias", "no", "model.bias"),
    ("model/context", "16", "model.context"),
    ("optimizer/learning_rate", "fast", "optimizer.learning_rate"),
    ("optimizer/learning_rate", None, "optimizer.learning_rate"),
    ("optimizer/betas", 0.9, "optimizer.betas"),
    ("optimizer/betas", [0.9], "optimizer.betas"),
    ("optimizer/betas", [0.9, 0.95, 0.99], "optimizer.betas"),
    ("optimizer/betas", ["a", 0.9], "optimizer.betas"),
    ("optimizer/clip", "none", "optimizer.clip"),
    ("out", 7, "out"),
    ("out", "", "out"),
    ("shape", "uniform", "shape"),
    ("shape", [], "shape"),
    ("shape/family", 3, "shape.family"),
    ("shape/layers", "two", "shape.layers"),
    ("shape/layers", 2.0, "shape.layers"),
    ("shape/width", [32, 32], "shape.width"),
    ("shape/heads", None, "shape.heads"),
    ("shape/mlp_ratio", "four", "shape.mlp_ratio"),
    ("compare", 3, "compare"),
    ("compare/shapes", ["uniform"], "compare.shapes"),
    ("compare/shapes/uniform", "uniform", "compare.shapes.uniform"),
    ("compare/shapes/uniform", None, "compare.shapes.uniform"),
    ("compare/shapes/uniform/family", 3, "compare.shapes.uniform"),
    ("compare/seeds", 3, "compare.seeds"),
    ("compare/seeds", ["a"], "compare.seeds"),
    ("compare/tune", True, "compare.tune"),
    ("compare/prompt", 3, "compare.prompt"),
    # ranges
    ("train/steps", 0, "train.steps"),
    ("train/steps", -4, "train.steps"),
    ("train/batch_tokens", 0, "train.batch_tokens"),
    ("train/micro_batch", 0, "train.micro_batch"),
    ("train/seed", -1, "train.seed"),
    ("train/seed", 2**63, "train.seed"),
    ("train/threads", 0, "train.threads"),
    ("train/evaluate_every", 0, "train.evaluate_every"),
    ("train/evaluate_tokens", 0, "train.evaluate_tokens"),
    ("train/checkpoint_every", 0, "train.checkpoint_every"),
    ("train/keep_checkpoints", 0, "train.keep_checkpoints"),
    ("train/precision", "fp8", "train.precision"),
    ("train/device", "tpu", "train.device"),
    ("model/style", "bert", "model.style"),
    ("model/context", 0, "model.context"),
    ("model/norm", "batchnorm", "model.norm"),
    ("model/positions", "alibi", "model.positions"),
    ("model/activation", "relu", "model.activation"),
    ("model/norm_epsilon", 0.0, "model.norm_epsilon"),
    ("model/norm_epsilon", NAN, "model.norm_epsilon"),
    ("model/rotary_theta", -1.0, "model.rotary_theta"),
    ("optimizer/name", "sgd", "optimizer.name"),
    ("optimizer/learning_rate", 0, "optimizer.learning_rate"),
    ("optimizer/learning_rate", -1e-3, "optimizer.learning_rate"),
    ("optimizer/learning_rate", INF, "optimizer.learning_rate"),
    ("optimizer/learning_rate", NAN, "optimizer.learning_rate"),
    ("optimizer/weight_decay", -0.1, "optimizer.weight_decay"),
    ("optimizer/weight_decay", INF, "optimizer.weight_decay"),
    ("optimizer/betas", [0.9, 1.0], "optimizer.betas"),
    ("optimizer/betas", [-0.1, 0.9], "optimizer.betas"),
    ("optimizer/betas", [NAN, 0.9], "optimizer.betas"),
    ("optimizer/epsilon", 0, "optimizer.epsilon"),
    ("optimizer/clip", 0, "optimizer.clip"),
    ("optimizer/clip", -1.0, "optimizer.clip"),
    ("optimizer/clip", INF, "optimizer.clip"),
    ("schedule/name", "linear", "schedule.name"),
    ("schedule/warmup_steps", -1, "schedule.warmup_steps"),
    ("schedule/final_ratio", 1.1, "schedule.final_ratio"),
    ("schedule/final_ratio", -0.1, "schedule.final_ratio"),
    ("schedule/final_ratio", NAN, "schedule.final_ratio"),
    ("shape/family", "colonnade", "shape.family"),
    ("shape/layers", 0, "shape.layers"),
    ("shape/width", -32, "shape.width"),
    ("shape/heads", 5, "shape: layer 1"),
    ("shape/heads", 32, "shape: layer 1"),
    ("shape/kv_heads", 3, "shape: layer 1"),
    ("shape/mlp_ratio", INF, "shape.mlp_ratio"),
    ("shape/mlp_ratio", NAN, "shape.mlp_ratio"),
    ("compare/shapes", {}, "compare.shapes"),
    ("compare/shapes", {"../x": {"family": "uniform"}}, "compare.shapes"),
    ("compare/shapes", {"/etc": {"family": "uniform"}}, "compare.shapes"),
    ("compare/shapes", {"..": {"family": "uniform"}}, "compare.shapes"),
    ("compare/shapes", {"a/b": {"family": "uniform"}}, "compare.shapes"),
    ("compare/shapes", {"": {"family": "uniform"}}, "compare.shapes"),
    ("compare/shapes", {".hidden": {"family": "uniform"}}, "compare.shapes"),
    ("compare/shapes", {"a b": {"family": "uniform"}}, "compare.shapes"),
    ("compare/shapes", {"a\n": {"family": "uniform"}}, "compare.shapes"),
    ("compare/shapes", {"x" * 81: {"family": "uniform"}}, "compare.shapes"),
    ("compare/shapes", {3: {"family": "uniform"}}, "compare.shapes"),
    ("compare/shapes/prism/heads", [4, 2], "compare.shapes.prism"),
    ("compare/shapes/prism/heads", [2, 4, 4], "compare.shapes.prism"),
    ("compare/shapes/prism/heads", [0, 4], "compare.shapes.prism"),
    ("compare/shapes/prism/heads", "many", "compare.shapes.prism"),
    ("compare/shapes/uniform/family", "colonnade", "compare.shapes.uniform"),
    ("compare/shapes/uniform/width", 30, "compare.shapes.uniform"),
    ("compare/seeds", [], "compare.seeds"),
    ("compare/seeds", [-1], "compare.seeds"),
    ("compare/seeds", [2**63], "compare.seeds"),
    ("compare/match/by", "size", "compare.match.by"),
    ("compare/match/tolerance", -0.1, "compare.match.tolerance"),
    ("compare/match/tolerance", NAN, "compare.match.tolerance"),
    ("compare/tune/learning_rate", [], "compare.tune.learning_rate"),
    ("compare/tune/learning_rate", [1e-3], "compare.tune.learning_rate"),
    ("compare/tune/learning_rate", [1e-3, 0], "compare.tune.learning_rate"),
    ("compare/tune/learning_rate", [1e-3, NAN], "compare.tune.learning_rate"),
    # contradictions
    ("train/batch_tokens", 100, "train.batch_tokens 100 is no multiple of model.context 16"),
    ("train/batch_tokens", 8, "train.batch_tokens 8 is no multiple of model.context 16"),
    ("train/micro_batch", 3, "train.micro_batch 3 does not divide the 8 sequences"),
    ("train/micro_batch", 16, "train.micro_batch 16 does not divide the 8 sequences"),
    ("schedule/decay_steps", 2, "decay_steps"),
    ("compare/seeds", [0, 1, 1], "seeds [0, 1, 1] repeat"),
    ("train/mask_share", 0.3, "train.mask_share 0.3 is for encoders, and model.causal is true"),
    ("model", {"context": 16, "causal": "no"}, "model.causal"),
    ("compare/tune/seed", 1, "tune.seed 1 is also in seeds"),
    ("compare/tune/learning_rate", [1e-3, 1e-3], "tune.learning_rate"),
    # unknown keys, with the nearest known one
    ("trian", {}, "trian: unknown setting (did you mean 'train'?)"),
    ("train/step", 3, "train.step: unknown setting (did you mean 'steps'?)"),
    ("train/learning_rate", 3e-3, "train.learning_rate: unknown setting"),
    ("optimizer/learning-rate", 3e-3, "optimizer.learning-rate: unknown setting (did you mean 'learning_rate'?)"),
    ("model/vocab_size", 3, "model.vocab_size: unknown setting"),
    ("data/paht", "x", "data.paht: unknown setting (did you mean 'path'?)"),
    ("schedule/warmup", 3, "schedule.warmup: unknown setting (did you mean 'warmup_steps'?)"),
    ("compare/seed", 3, "compare.seed: unknown setting (did you mean 'seeds'?)"),
    ("compare/match/tolerence", 3, "compare.match.tolerence: unknown setting (did you mean 'tolerance'?)"),
    ("compare/tune/rates", [1, 2], "compare.tune.rates: unknown setting"),
    ("shape/widht", 32, "shape.widht: family uniform has no such setting (did you mean 'width'?)"),
    ("shape/bottleneck", 0.3, "shape.bottleneck: family uniform has no such setting"),
    ("compare/shapes/prism/head", 3, "compare.shapes.prism: head: family prism has no such setting (did you mean"),
    ("", 3, ": unknown setting"),
]


@pytest.mark.parametrize(("name", "value", "names"), _VALUES, ids=lambda each: repr(each)[:40])
def test_a_wrong_value(name: str, value: Any, names: str, command: Command) -> None:
    Path("c.yaml").write_text(yaml.safe_dump(_with(name, value)), encoding="utf-8")
    _assert_one_line(command("train", "c.yaml"), status=2, names=names)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("name", "value", "names"),
    [
        ("train/mask_share", 0, "train.mask_share: expected greater than 0"),
        ("train/mask_share", 1, "train.mask_share: expected less than 1"),
        ("train/mask_share", -0.1, "train.mask_share"),
        ("train/mask_share", 15, "train.mask_share"),
        ("train/mask_share", NAN, "train.mask_share"),
        ("train/mask_share", "0.3", "train.mask_share"),
        ("train/mask_shares", 0.3, "train.mask_shares: unknown setting (did you mean 'mask_share'?)"),
        ("compare/match/by", "kv", "compare.match.by kv: an encoder (model.causal false) keeps no cache"),
    ],
)
def test_a_wrong_value_of_an_encoder(name: str, value: Any, names: str, command: Command) -> None:
    data = _with(name, value)
    data["model"] = {**data["model"], "causal": False}
    Path("c.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    for what in ("train", "compare"):
        _assert_one_line(command(what, "c.yaml"), status=2, names=names)
    assert not Path("run").exists()


def test_windows_look_back_only_so_that_an_encoder_has_none(command: Command) -> None:
    layer = {"width": 32, "heads": 4, "kv_heads": 4, "head_dim": 8, "mlp_hidden": 32}
    data = _without("compare")
    data["model"] = {**data["model"], "causal": False}
    data["shape"] = {"family": "explicit", "embed_width": 32, "layers": [layer, {**layer, "window": 8}]}
    Path("c.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    _assert_one_line(command("train", "c.yaml"), status=2, names="shape: layer 2: window 8: windows end at the token")


def test_compare_checks_as_train_does(command: Command) -> None:
    for name, value, names in _VALUES[::6]:
        Path("c.yaml").write_text(yaml.safe_dump(_with(name, value)), encoding="utf-8")
        _assert_one_line(command("compare", "c.yaml"), status=2, names=names)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("data", "data: missing"),
        ("shape", "shape: missing"),
        ("train", "train: missing"),
        ("out", "out: missing"),
        ("data/path", "data.path: missing"),
        ("train/steps", "train.steps: missing"),
        ("shape/family", "shape.family: missing"),
        ("shape/width", "shape.width: missing"),
        ("compare/shapes", "compare.shapes: missing"),
        ("compare/tune/learning_rate", "compare.tune.learning_rate: missing"),
    ],
)
def test_a_missing_setting(name: str, names: str, command: Command) -> None:
    Path("c.yaml").write_text(yaml.safe_dump(_without(name)), encoding="utf-8")
    _assert_one_line(command("train", "c.yaml"), status=2, names=names)


_TEXTS: list[tuple[str | bytes, str]] = [
    ("", "c.yaml"),
    ("# nothing\n", "c.yaml"),
    ("just words\n", "c.yaml"),
    ("- a\n- b\n", "c.yaml"),
    ("3\n", "c.yaml"),
    ("train: {steps: 3\n", "line 2"),
    ("train:\n  steps: 3\n steps: 4\n", "line 3"),
    ("train:\n\tsteps: 3\n", "line 2"),
    ("a: b: c\n", "line 1"),
    ("out: 'unclosed\n", "c.yaml"),
    ("out: run\nout: other\n", "line 2"),
    ("train: {steps: 1, steps: 2}\n", "'steps' is given twice"),
    ("out: *nobody\n", "line 1"),
    ("out: !!python/object/apply:os.system ['touch owned']\n", "line 1"),
    ("out: !!python/name:os.system\n", "line 1"),
    ("!!python/object/new:os.system ['touch owned']\n", "line 1"),
    ("out: !include other.yaml\n", "line 1"),
    ("out: !!set {a, b}\n", "line 1"),
    ("out: !!binary aGVsbG8=\n", "line 1"),
    ("? [a, b]\n: 3\n", "line 1"),
    ("1: 2\n", "c.yaml"),
    ("null: 2\n", "c.yaml"),
    ("a: 1\n---\nb: 2\n", "c.yaml"),
    ("[" * 5000, "c.yaml"),
    ("train: {steps: " + "9" * 5000 + "}\n", "c.yaml"),
    (b"\xff\xfe\x00out", "c.yaml"),
    (b"out: \x00\x01\n", "c.yaml"),
    ("train: &again {steps: *again}\n", "c.yaml"),
    ("shape: &again {family: uniform, layers: *again}\n", ""),
    ("a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{n}: &{n} [{','.join(['*' + p] * 9)}]\n" for p, n in zip("abcdefgh", "bcdefghi", strict=True)
    ) + "out: *i\n", ""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "names"), _TEXTS, ids=lambda each: repr(each)[:30])
def test_text_that_is_no_configuration(text: str | bytes, names: str, command: Command) -> None:
    Path("c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    _assert_one_line(command("train", "c.yaml"), status=2, names=names)
    assert not Path("owned").exists(), "text of a configuration was run"


def test_a_file_that_cannot_be_read(command: Command) -> None:
    _assert_one_line(command("train", "nothing.yaml"), status=2, names="nothing.yaml: no such file")
    Path("folder").mkdir()
    _assert_one_line(command("train", "folder"), status=2, names="folder: is a directory")


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("train.steps", "-s train.steps"),
        ("", "-s "),
        ("=3", "-s =3"),
        ("train.steps=", "train.steps"),
        ("train.steps=x", "train.steps"),
        ("train.steps=[1", "-s train.steps"),
        ("train.steps=!!python/object/apply:os.system ['touch owned']", "-s train.steps"),
        ("train.steps.more=3", "steps is a value, not a section"),
        ("out.more=3", "out is a value, not a section"),
        ("optimizer.betas.0=3", "betas is a value, not a section"),
        ("train=3", "train"),
        ("train.=3", "train."),
        (".steps=3", "unknown setting"),
        ("trian.steps=3", "trian: unknown setting (did you mean 'train'?)"),
        ("train.stpes=3", "train.stpes: unknown setting (did you mean 'steps'?)"),
        ("compare.shapes.../x.family=uniform", "compare.shapes"),
    ],
)
def test_a_wrong_setting_on_the_line(override: str, names: str, command: Command) -> None:
    Path("c.yaml").write_text(yaml.safe_dump(_BASE), encoding="utf-8")
    _assert_one_line(command("train", "c.yaml", "-s", override), status=2, names=names)
    assert not Path("owned").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("train",),
        ("train", "c.yaml", "more"),
        ("train", "c.yaml", "--nonsense"),
        ("train", "c.yaml", "-s"),
        ("compare",),
        ("compare", "c.yaml", "--allow-unequals"),
        ("generate",),
        ("generate", "run", "--tokens", "many"),
        ("nonsense",),
    ],
    ids=" ".join,
)
def test_wrong_usage(arguments: tuple[str, ...], command: Command) -> None:
    Path("c.yaml").write_text(yaml.safe_dump(_BASE), encoding="utf-8")
    _assert_one_line(command(*arguments), status=2, names="")


def test_what_is_not_there(command: Command) -> None:
    Path("c.yaml").write_text(yaml.safe_dump(_BASE), encoding="utf-8")
    for name in ("train", "compare"):
        _assert_one_line(command(name, "c.yaml"), status=1, names="data")
    _assert_one_line(command("generate", "run2"), status=1, names="run2: not a run folder")
    Path("plain").mkdir()
    Path("plain", "manifest.json").write_text("{", encoding="utf-8")
    _assert_one_line(command("train", "c.yaml", "-s", "data.path=plain"), status=1, names="plain/manifest.json")
    long = "x" * 300
    line = f"{long}: holds no prepared data that can be read (manifest.json: file name too long)"
    _assert_one_line(command("train", "c.yaml", "-s", f"data.path={long}"), status=1, names=line)
    Path("file").write_text("", encoding="utf-8")
    _assert_one_line(command("train", "c.yaml", "-s", "out=file"), status=2, names="out: file")
    _assert_one_line(command("train", "c.yaml", "-s", "out=file/within"), status=2, names="out: file")
    Path("c.yaml").write_text(yaml.safe_dump(_without("compare")), encoding="utf-8")
    _assert_one_line(command("compare", "c.yaml"), status=2, names="compare: missing")


def test_debug_shows_the_traceback(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["entasis", "train", "nothing.yaml", "--debug"])
    with pytest.raises(Exception, match="no such file"):
        run()
    assert command("train", "nothing.yaml").status == 2


def _mutated(source: random.Random) -> dict[str, Any]:
    """The base with one to three places replaced by something else, removed, or given a new name."""
    data = copy.deepcopy(_BASE)
    junk: list[Any] = [
        None, True, False, 0, -1, 1, 3, 2**70, 0.5, -0.0, NAN, INF, -INF, 1e300, "", "auto", "x" * 300,
        "1e5", "ü\n\t\0", [], [[]], [None], {}, {"": {}}, {"family": "prism"}, {"a": {"b": [1, {"c": None}]}},
        list(range(100)),
    ]  # fmt: skip
    for _ in range(source.randint(1, 3)):
        place: Any = data
        while True:
            key = source.choice(list(place) if isinstance(place, dict) else range(len(place)))
            inner = place[key]
            if isinstance(inner, dict | list) and inner and source.random() < 0.8:
                place = inner
                continue
            action = source.random()
            if action < 0.7:
                place[key] = source.choice(junk)
            elif action < 0.85:
                del place[key]
            elif isinstance(place, dict):
                place[source.choice(["", "x", "steps", "../y", "family", "Ünknown"])] = place.pop(key)
            break
        if not data:
            break
    return data


@pytest.mark.parametrize("seed", range(5))
def test_configurations_mutated_at_random(seed: int, command: Command) -> None:
    """Whatever a file holds: a line and a status. What is right by chance finds no data, which is a line as well."""
    source = random.Random(seed)
    for _ in range(40):
        data = _mutated(source)
        Path("c.yaml").write_text(yaml.dump(data, Dumper=yaml.SafeDumper), encoding="utf-8")
        said = command(source.choice(["train", "compare"]), "c.yaml")
        assert said.status in (1, 2)
        _assert_one_line(said, status=said.status, names="")


@pytest.mark.parametrize("name", ["compare", "transfer", "coordinates"])
def test_a_study_is_refused_under_torchrun(name: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("c.yaml").write_text(yaml.safe_dump(_BASE), encoding="utf-8")
    alone = command(name, "c.yaml")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert command(name, "c.yaml") == alone, "torchrun with one process is as good as none"
    monkeypatch.setenv("WORLD_SIZE", "2")  # and not RANK, with which the process itself would end
    said = command(name, "c.yaml")
    _assert_one_line(said, status=2, names=f"entasis {name}: WORLD_SIZE is 2 in the environment")
    assert ("--workers N" in said.error) == (name != "coordinates"), "an option that the command has"
    assert [path.name for path in Path().iterdir()] == ["c.yaml"]
