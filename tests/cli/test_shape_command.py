"""`entasis shape` as a person or a script meets it: what is printed where, exit statuses, and how soon it answers."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from entasis.__main__ import run
from entasis.shape.budget import Budget
from entasis.shape.columns import straightened
from entasis.shape.families import design, families, family_settings
from entasis.shape.model_config import ModelConfig
from entasis.shape.profiles import PROFILES, profile
from entasis.shape.records import LayerShape, Shape
from entasis.shape.registry import FAMILIES, Design, register_family

WIDTHS_200M = [1152, 960, 832, 704, 608, 512, 448, 352, 320, 256, 224, 192, 288, 480, 736, 1152]
BOWTIE = ["bowtie", "--layers", "16", "--width", "640", "--heads", "16"]
PRISM = ["prism", "--width", "768", "--heads", "3,3,3,6,6,6,12,12,12,12,12,12"]
FIELDS = ["family", "layers", "embed_width", "unembed_width", "budget", "uniform", "ratio", "findings"]
LAYER = {"width": 48, "heads": 4, "kv_heads": 2, "head_dim": 12, "mlp_hidden": 128}


class Answer(NamedTuple):
    status: int
    out: str
    err: str


Ask = Callable[..., Answer]


@pytest.fixture
def entasis(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs the command line in this process."""

    def ask(*arguments: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["entasis", *arguments])
        with pytest.raises(SystemExit) as left:
            run()
        assert isinstance(left.value.code, int)
        captured = capsys.readouterr()
        return Answer(left.value.code, captured.out, captured.err)

    return ask


@pytest.fixture
def shape(entasis: Ask) -> Ask:
    """`entasis shape ...`"""
    return lambda *arguments: entasis("shape", *arguments)


def loaded(answer: Answer) -> dict[str, Any]:
    """The one JSON object that was printed; checks that it has exactly the documented fields."""
    assert answer.err == ""
    assert answer.out.count("\n") == 1
    data: dict[str, Any] = json.loads(answer.out)
    assert list(data) == FIELDS
    for finding in data["findings"]:
        assert list(finding) == ["level", "layer", "message"]
        assert finding["level"] in {"error", "warning"}
        assert finding["layer"] is None or finding["layer"] >= 1
    has_errors = any(finding["level"] == "error" for finding in data["findings"])
    assert answer.status == (1 if has_errors else 0)
    if data["budget"] is not None:
        budget_fields = [field.name for field in dataclasses.fields(Budget)]
        assert list(data["budget"]) == list(data["uniform"]) == list(data["ratio"]) == budget_fields
        for layer in data["layers"]:
            assert list(layer) == [field.name for field in dataclasses.fields(LayerShape)]
    return data


# --- JSON -------------------------------------------------------------------------------------------------------------


def test_json_of_a_published_bowtie(shape: Ask) -> None:
    data = loaded(
        shape(*BOWTIE, "--bottleneck", "0.3", "--turn", "12", "--multiple", "32", "--style", "llama", "--json")
    )
    assert data["family"] == "bowtie"
    assert [layer["width"] for layer in data["layers"]] == WIDTHS_200M
    assert (data["embed_width"], data["unembed_width"]) == (640, None)
    assert data["ratio"]["effective_parameters"] == pytest.approx(1, abs=0.01)
    for name, ratio in data["ratio"].items():
        assert ratio == data["budget"][name] / data["uniform"][name]
    assert Shape.from_dict({name: data[name] for name in FIELDS[1:4]}).layers[0].width == 1152


def test_json_of_a_prism(shape: Ask) -> None:
    data = loaded(shape(*PRISM, "--style", "gpt2", "--json"))
    assert [layer["heads"] for layer in data["layers"]] == [3] * 3 + [6] * 3 + [12] * 6
    assert data["budget"] == data["uniform"]
    assert data["budget"]["parameters"] == 124_439_808
    assert data["budget"]["effective_parameters"] == 123_532_032


def test_every_option_arrives(shape: Ask) -> None:
    options = [
        "--layers",
        "4",
        "--width",
        "64",
        "--heads",
        "4",
        "--kv-heads",
        "2",
        "--head-dim",
        "8",
        "--vocab",
        "97",
        "--context",
        "16",
        "--style",
        "gpt2",
    ]
    data = loaded(shape("uniform", *options, "--mlp-ratio", "2.5", "--json"))
    layer = {"width": 64, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp_hidden": 160}
    assert data["layers"] == [dataclasses.asdict(LayerShape(**layer))] * 4
    assert data["budget"]["context"] == 16
    assert data["budget"]["embedding_parameters"] == (97 + 16) * 64
    assert loaded(shape("uniform", *options, "--mlp-hidden", "7", "--json"))["layers"][0]["mlp_hidden"] == 7
    heads = ["--heads", "2,2,4,4", "--kv-heads", "1,1,2,2", "--baseline-heads", "4"]
    prism = loaded(shape("prism", "--width", "64", "--layers", "4", *heads, "--json"))
    assert [layer["kv_heads"] for layer in prism["layers"]] == [1, 1, 2, 2]
    assert loaded(shape(*BOWTIE, "--match", "effective", "--json"))["layers"][0]["width"] == 1152


@pytest.mark.parametrize(
    ("arguments", "layer", "message"),
    [
        (["prism", "--width", "48", "--heads", "4,4,2,2"], 3, "2 heads after 4"),
        (["prism", "--width", "48", "--heads", "2,2,4,4", "--baseline-heads", "8"], 4, "the last layer has 4 heads"),
        (["uniform", "--layers", "2", "--width", "48", "--heads", "5"], 1, "5 heads do not divide width 48"),
        ([*BOWTIE, "--kv-heads", "3"], 1, "3 key/value heads do not divide 16 heads"),
        (["uniform", "--layers", "2", "--width", "20", "--heads", "4"], 1, "head dim 5 is odd"),
    ],
)
def test_error_findings_come_with_the_whole_object_and_status_1(
    shape: Ask, arguments: list[str], layer: int, message: str
) -> None:
    data = loaded(shape(*arguments, "--json"))
    assert data["budget"] is not None
    first = data["findings"][0]
    assert (first["level"], first["layer"]) == ("error", layer)
    assert first["message"].startswith(message)
    drawn = shape(*arguments)
    assert drawn.status == 1
    assert any(message in line for line in drawn.out.splitlines() if line.startswith("error: layer"))


@pytest.mark.parametrize(
    ("arguments", "layer", "message"),
    [
        ([*BOWTIE, "--multiple", "1000"], 12, "width 192.0 rounds to 0 at multiple 1000"),
        (
            ["growing", "--layers", "2", "--width", "640", "--heads", "16"],
            None,
            "match: effective parameters cannot be",
        ),
        (["openelm", "--layers", "16", "--width", "1280", "--match", "kv"], None, "match: kv does not grow with what"),
        (["prism", "--width", "48", "--heads", "0,4"], 1, "heads 0; expected at least 1"),
        (["uniform", "--layers", "1", "--width", "2000000000", "--heads", "1"], 1, "mlp_hidden: expected at most"),
    ],
)
def test_where_no_shape_exists_the_object_says_why(
    shape: Ask, arguments: list[str], layer: int | None, message: str
) -> None:
    data = loaded(shape(*arguments, "--json"))
    assert (data["layers"], data["budget"], data["uniform"], data["ratio"]) == ([], None, None, None)
    assert [(each["level"], each["layer"]) for each in data["findings"]] == [("error", layer)]
    assert data["findings"][0]["message"].startswith(message)
    drawn = shape(*arguments)
    assert (drawn.status, drawn.out) == (1, "")
    assert drawn.err.startswith("error: ")
    assert drawn.err.count("\n") == 1


def test_warnings_alone_leave_with_status_0(shape: Ask) -> None:
    data = loaded(shape("prism", "--width", "768", "--heads", "3,6,6,12", "--json"))
    assert {finding["level"] for finding in data["findings"]} == {"warning"}


# --- wrong usage ------------------------------------------------------------------------------------------------------


WRONG = [
    ([], "family: missing"),
    (["bowtei"], "family: unknown family 'bowtei'"),
    ([""], "family: unknown family ''"),
    (["bowtie"], "layers: missing"),
    (["bowtie", "--layers", "16"], "width: missing"),
    ([*BOWTIE, "--turn", "16"], "turn: "),
    ([*BOWTIE, "--turn", "0"], "turn: "),
    ([*BOWTIE, "--bottleneck", "1.5"], "bottleneck: "),
    ([*BOWTIE, "--bottleneck", "nan"], "bottleneck: "),
    ([*BOWTIE, "--match", "flop"], "match: "),
    ([*BOWTIE, "--heads", "3,4"], "heads: "),
    ([*BOWTIE, "--heads", "-4"], "heads: "),
    ([*BOWTIE, "--head-dim", "0"], "head_dim: "),
    ([*BOWTIE, "--mlp-ratio", "inf"], "mlp_ratio: "),
    ([*BOWTIE, "--mlp-hidden", "-1"], "mlp_hidden: "),
    ([*BOWTIE, "--multiple", "0"], "multiple: "),
    ([*BOWTIE, "--vocab", "0"], "vocab_size: "),
    ([*BOWTIE, "--context", "-1"], "context: "),
    ([*BOWTIE, "--baseline-heads", "3"], "baseline_heads: family bowtie has no such setting"),
    (["uniform", "--layers", "1000000000", "--width", "8", "--heads", "1"], "layers: "),
    (["uniform", "--layers", "2", "--width", "99999999999999999999", "--heads", "1"], "width: "),
    (["uniform", "--layers", "2", "--width", "48", "--heads", ""], "heads: "),
    (["uniform", "--layers", "2", "--width", "48", "--heads", "3,"], "heads: "),
    (["uniform", "--layers", "2", "--width", "48", "--heads", "1.5"], "heads: "),
    (["uniform", "--layers", "2", "--width", "48", "--heads", "4", "--kv-heads", "x"], "kv_heads: "),
    (["prism", "--width", "48", "--heads", "4"], "layers: missing"),
    (["prism", "--width", "48", "--heads", "2,4,4", "--layers", "4"], "heads: 3 values for 4 layers"),
    (["explicit"], "layers: missing"),
    (["nowhere.yaml"], "nowhere.yaml: no such file"),
    # what the parser of the command line finds
    ([*BOWTIE, "--layers", "many"], "--layers"),
    ([*BOWTIE, "--width", "6.5"], "--width"),
    ([*BOWTIE, "--bottleneck", "small"], "bottleneck: expected a number"),
    ([*BOWTIE, "--style", "gpt3"], "--style"),
    ([*BOWTIE, "--turm", "3"], "turm: family bowtie has no such setting (did you mean 'turn'?)"),
    ([*BOWTIE, "--turm=3"], "turm: family bowtie has no such setting (did you mean 'turn'?)"),
    ([*BOWTIE, "--permute"], "permute: its value is missing"),
    ([*BOWTIE, "--permute", "--json"], "permute: its value is missing"),
    ([*BOWTIE, "--permute=-1"], "permute: expected at least 0, got -1"),
    ([*BOWTIE, "--permute", "-1"], "permute: expected at least 0, got -1"),
    ([*BOWTIE, "--permute", "1,2"], "permute: expected a whole number"),
    ([*BOWTIE, "--permute", "1,x"], "permute: expected a number or a list like 3,3,6,6; got '1,x'"),
    ([*BOWTIE, "--permute", "[1"], "--permute: line 1"),
    ([*BOWTIE, "--progression", "harmonic"], "progression: expected 'geometric' or 'arithmetic'; got 'harmonic'"),
    ([*BOWTIE, "--1x", "3"], "--1x: expected an option and its value"),
    ([*BOWTIE, "-x", "3"], "-x: expected an option and its value"),
    (["--permute", "3", "bowtie"], "--permute: the family comes before its settings"),
    (
        ["prism", "--layers", "12", "--width", "768", "--heads", "12", "--early-head-dim", "x"],
        "early_head_dim: expected",
    ),
    (["uniform", "--enumerate", "--layers", "3"], "--enumerate: for prism and bowtie, not for uniform"),
    (["prism", "--enumerate", "--layers", "3", "--width", "48"], "baseline_heads: missing"),
    (["prism", "--enumerate", "--layers", "3", "--width", "48", "--heads", "2,4"], "baseline_heads: expected a whole"),
    (["prism", "--enumerate", "--layers", "3", "--kv-heads", "4"], "kv_heads: prism --enumerate has no such setting"),
    (["bowtie", "--enumerate"], "layers: missing"),
    (["bowtie", "--enumerate", "--layers", "2", "--width", "64", "--heads", "4"], "layers: expected from 3"),
    (["bowtie", "--enumerate", "--layers", "1000000000", "--width", "64", "--heads", "4"], "layers: expected from 3"),
    (
        ["bowtie", "--enumerate", "--layers", "4", "--width", "64", "--heads", "4", "--turn", "4"],
        "turn: expected a layer",
    ),
    ([*BOWTIE, "--turn"], "--turn"),
    ([*BOWTIE, "another"], "another"),
]


@pytest.mark.parametrize(
    ("arguments", "named"), WRONG, ids=lambda each: " ".join(each) if isinstance(each, list) else ""
)
@pytest.mark.parametrize("as_json", [False, True], ids=["drawn", "json"])
def test_wrong_usage_is_one_line_that_names_the_field(
    shape: Ask, arguments: list[str], named: str, as_json: bool
) -> None:
    answer = shape(*(["--json"] if as_json else []), *arguments)
    assert answer.status == 2
    assert answer.out == ""
    assert answer.err.count("\n") == 1
    assert answer.err.startswith("error: ")
    assert named in answer.err
    assert "unexpected" not in answer.err.replace("unexpected extra argument", "")
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("command", ["shapes", "-x", "--nothing"])
def test_wrong_commands_are_one_line_too(entasis: Ask, command: str) -> None:
    answer = entasis(command)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.count("\n") == 1
    assert command in answer.err


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["--debug", "shape", "bowtei"], ["shape", "bowtei", "--debug"]):
        monkeypatch.setattr(sys, "argv", ["entasis", *arguments])
        with pytest.raises(Exception, match=r"unknown family 'bowtei'"):
            run()


def test_what_nobody_foresaw_is_one_line_as_well(entasis: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setitem(FAMILIES, "broken", lambda config: broken())
    answer = entasis("shape", "broken")
    assert (answer.status, answer.out) == (1, "")
    assert answer.err == "error: unexpected RuntimeError: two lines (run again with --debug for the traceback)\n"


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_holds_a_family_and_the_command_line_wins(shape: Ask, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("family: bowtie\nlayers: 16\nwidth: 640\nheads: 16\nturn: 4\n")
    assert loaded(shape(str(path), "--turn", "12", "--json"))["layers"] == loaded(shape(*BOWTIE, "--json"))["layers"]
    assert loaded(shape(str(path), "--json"))["family"] == "bowtie"
    assert loaded(shape(str(path), "--json"))["layers"][3]["width"] == 192


def test_a_run_s_configuration_shows_its_shape_and_its_resize(shape: Ask, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {path: nowhere, vocab_size: 999}\nmodel: {context: 512, resize: gated}\n"
        "shape: {family: bowtie, layers: 8, width: 256, heads: 8}\ntrain: {steps: 1}\nout: nowhere\n"
    )
    answer = shape(str(path), "--multiple", "16")
    assert answer.status == 0
    assert "between widths: gated, an ablation" in answer.out
    assert "at 512 tokens of context" in answer.out
    data = loaded(shape(str(path), "--multiple", "16", "--json"))
    config = ModelConfig(999, 512, resize="gated")
    made = design("bowtie", {"layers": 8, "width": 256, "heads": 8, "multiple": 16}, config)
    assert data["layers"] == made.shape.to_dict()["layers"]
    assert "between widths" not in shape(*BOWTIE).out


def test_multiples_are_options(shape: Ask) -> None:
    layers = loaded(shape(*BOWTIE, "--head-dim-multiple", "8", "--mlp-multiple", "128", "--json"))["layers"]
    assert all(layer["head_dim"] % 8 == layer["mlp_hidden"] % 128 == 0 for layer in layers)


@pytest.mark.parametrize("ending", ["json", "yaml", "yml"])
def test_a_file_holds_a_shape_written_out(shape: Ask, tmp_path: Path, ending: str) -> None:
    wanted = Shape((LayerShape(**LAYER), LayerShape(32, 2, 2, 16, 64, value_dim=8)), 40, 24)
    path = tmp_path / f"shape.{ending}"
    path.write_text(wanted.to_json() if ending == "json" else wanted.to_yaml())
    data = loaded(shape(str(path), "--json"))
    assert data["family"] == "explicit"
    assert Shape.from_dict({name: data[name] for name in FIELDS[1:4]}) == wanted


@pytest.mark.parametrize(
    ("content", "status", "line"),
    [
        ("family: [bowtie]\n", 2, "family: expected a name, got ['bowtie']"),
        ("family: bowtie\nlayers: [8\nwidth: 3\n", 2, "line 3, column 6"),
        ("family: !!python/object/apply:os.getcwd []\n", 2, "line 1, column 9: tag"),
        ("family: bowtie\nfamily: prism\n", 2, "line 2, column 1: 'family' is given twice"),
        ("family: bowtie\nlayers: 8\nwidth: 256\nheads: 8\nturm: 6\n", 2, "turm: family bowtie has no such setting"),
        ("family: uniform\nlayers: eight\nwidth: 256\nheads: 8\n", 2, "layers: expected a whole number; got 'eight'"),
        ("layers: 3\nembed_width: 3\n", 2, "layers: expected a list; got 3"),
        ("embed_width: 3\n", 2, "layers: missing"),
        ("- 1\n", 2, "expected settings as `name: value` lines"),
        ("layers: [1]\nembed_width: 3\n", 1, "layer 1: expected an object with width"),
        ("layers: [{width: 3}]\nembed_width: 3\n", 1, "layer 1: heads: missing"),
        (f"layers: [{json.dumps(LAYER | {'heads': 'four'})}]\nembed_width: 3\n", 1, "layer 1: heads: expected a whole"),
        (f"layers: [{json.dumps(LAYER | {'depth': 4})}]\nembed_width: 3\n", 1, "layer 1: unknown field 'depth'"),
    ],
)
def test_a_wrong_file_is_one_line(shape: Ask, tmp_path: Path, content: str, status: int, line: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(content)
    answer = shape(str(path))
    assert (answer.status, answer.out) == (status, "")
    assert answer.err.count("\n") == 1
    assert line in answer.err
    assert "Traceback" not in answer.err


def test_what_contradicts_itself_is_said_at_its_layer(shape: Ask, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    layers = [LAYER | {"window": 8}, LAYER | {"experts": 4}, LAYER | {"experts_per_token": 1}]
    path.write_text(json.dumps({"layers": layers, "embed_width": 48}))
    data = loaded(shape(str(path), "--json"))
    said = {each["layer"]: each["message"] for each in data["findings"] if each["level"] == "error"}
    assert set(said) == {2, 3}
    assert all("experts_per_token" in message for message in said.values())


# --- for people -------------------------------------------------------------------------------------------------------


def test_the_drawing_holds_layers_costs_and_findings(shape: Ask) -> None:
    answer = shape(*BOWTIE)
    assert (answer.status, answer.err) == (0, "")
    assert [int(line.split()[1]) for line in answer.out.splitlines()[1:17]] == WIDTHS_200M
    assert "effective parameters" in answer.out
    assert "1.0017" in answer.out
    assert "warning: 15 distinct layer shapes" in answer.out
    assert all(len(line) <= 130 for line in answer.out.splitlines())


def test_the_list_names_every_family_with_its_settings(shape: Ask) -> None:
    answer = shape("--list")
    assert answer.status == 0
    lines = answer.out.splitlines()
    assert lines[0] == "families"
    listed = lines[1 : lines.index("")]
    assert [line.split()[0] for line in listed[::2]] == list(families())
    for name, line in zip(families(), listed[1::2], strict=True):
        assert line.strip() == f"settings: {', '.join(family_settings(name))}"
    assert len({len(line) - len(line.lstrip()) for line in listed[1::2]}) == 1


# --- settings of any family -------------------------------------------------------------------------------------------

RULE = ["prism", "--layers", "12", "--width", "768", "--heads", "12"]


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ([*RULE, "--early-head-dim", "256"], {"early_head_dim": 256}),
        ([*RULE, "--early-head-dim=256", "--hold=2"], {"early_head_dim": 256, "hold": 2}),
        (
            [*RULE, "--early_head_dim", "128", "--baseline-share", "0.25"],
            {"early_head_dim": 128, "baseline_share": 0.25},
        ),
        (
            ["prism-reversed", *RULE[1:], "--hold", "2", "--early-head-dim", "128", "--mlp-ratio", "2"],
            {"hold": 2, "early_head_dim": 128, "mlp_ratio": 2.0},
        ),
        (["tapered", *RULE[1:], "--curve", "linear", "--last", "25e-2"], {"curve": "linear", "last": 0.25}),
        (["growing", *RULE[1:], "--multiple", "24", "--permute=3"], {"multiple": 24, "permute": 3}),
        (["bowtie", *RULE[1:], "--multiple", "24", "--permute", "null"], {"multiple": 24}),
        (["crown", *RULE[1:], "--ends", "0.75", "--match", "flops"], {"ends": 0.75, "match": "flops"}),
        (["half-first", *RULE[1:], "--first", "0.75"], {"first": 0.75}),
        (
            ["bowtie", *RULE[1:], "--multiple", "24", "--match", "kv", "--progression", "arithmetic"],
            {"multiple": 24, "match": "kv", "progression": "arithmetic"},
        ),
    ],
)
def test_every_setting_of_every_family_is_an_option(shape: Ask, arguments: list[str], settings: dict[str, Any]) -> None:
    data = loaded(shape(*arguments, "--json"))
    wanted = design(arguments[0], {"layers": 12, "width": 768, "heads": 12, **settings})
    assert data["layers"] == wanted.shape.to_dict()["layers"]
    assert data["family"] == arguments[0]
    drawn = shape(*arguments)
    assert (drawn.status, drawn.err) == (0, "")


def test_families_and_profiles_from_outside_are_taken(shape: Ask) -> None:
    try:

        @profile("notch")
        def notch(layers: int, first: float, last: float) -> list[float]:
            return [first, *[last] * (layers - 1)]

        @register_family("stairs")
        def stairs(*, widths: list[int], tall: bool = False, config: ModelConfig) -> Design:
            """Layers of the widths that are listed."""
            made = Shape(tuple(LayerShape(each, 1, 1, 8, 64 if tall else 16) for each in widths), widths[0])
            return Design("stairs", made, straightened(made))

        data = loaded(shape("stairs", "--widths", "16,24,32", "--tall", "true", "--json"))
        assert [layer["width"] for layer in data["layers"]] == [16, 24, 32]
        assert data["layers"][0]["mlp_hidden"] == 64
        assert "stairs" in shape("--list").out
        assert "Layers of the widths that are listed." in shape("--list").out
        wrong = shape("stairs", "--width", "16")
        assert (wrong.status, wrong.out) == (2, "")
        assert wrong.err.startswith("error: width: family stairs has no such setting (did you mean 'widths'?)")
        data = loaded(shape("tapered", *RULE[1:], "--curve", "notch", "--json"))
        assert len({layer["mlp_hidden"] for layer in data["layers"][1:]}) == 1
        assert data["layers"][0]["mlp_hidden"] > data["layers"][1]["mlp_hidden"]
    finally:
        FAMILIES.pop("stairs", None)
        PROFILES.pop("notch", None)


# --- enumeration ------------------------------------------------------------------------------------------------------


def test_prism_schedules_are_listed_a_line_each(shape: Ask) -> None:
    arguments = [*RULE, "--enumerate", "--head-dim", "256,128"]
    answer = shape(*arguments)
    assert (answer.status, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert "3,3,3,6,6,6,12,12,12,12,12,12" in lines
    assert all(line.split(",")[-1] == "12" for line in lines)
    objects = [json.loads(line) for line in shape(*arguments, "--json").out.splitlines()]
    assert [",".join(map(str, each["heads"])) for each in objects] == lines
    freely = shape(*arguments, "--no-guidelines").out.splitlines()
    assert set(lines) < set(freely)
    assert "3,6,12,12,12,12,12,12,12,12,12,12" in set(freely) - set(lines)
    one = shape(
        "prism", "--layers", "6", "--width", "768", "--baseline-heads", "12", "--head-dim", "128", "--enumerate"
    )
    assert one.out.splitlines() == ["6,6,6,12,12,12", "6,6,12,12,12,12", "12,12,12,12,12,12"]
    # a schedule that is listed can be asked for
    assert shape("prism", "--width", "768", "--heads", lines[0]).status == 0


def test_bowties_are_listed_with_their_costs_or_the_reason(shape: Ask) -> None:
    base = ["bowtie", "--layers", "8", "--width", "256", "--heads", "8", "--enumerate"]
    grid = [*base, "--bottleneck", "0.01,0.3,0.5", "--turn", "3,6"]
    objects = [json.loads(line) for line in shape(*grid, "--json").out.splitlines()]
    assert [(each["bottleneck"], each["turn"]) for each in objects] == [
        (ratio, turn) for ratio in (0.01, 0.3, 0.5) for turn in (3, 6)
    ]
    assert all("rounds to 0" in each["reason"] for each in objects[:2])
    for each in objects[2:]:
        wanted = design("bowtie", {"layers": 8, "width": 256, "heads": 8, "bottleneck": each["bottleneck"],
                                   "turn": each["turn"]})  # fmt: skip
        assert each["widths"] == [layer.width for layer in wanted.shape.layers]
        assert each["ratio"]["effective_parameters"] == pytest.approx(1, abs=0.05)
        assert each["errors"] == []
    lines = shape(*grid).out.splitlines()
    assert len(lines) == 6
    assert lines[3].split()[-8:] == list(map(str, objects[3]["widths"]))
    assert len(shape(*base).out.splitlines()) == 5 * 6  # bottlenecks that are usual, every turning layer
    odd = shape(*base[:-1], "--enumerate", "--multiple", "20", "--bottleneck", "0.5", "--turn", "6")
    assert odd.status == 0
    assert "error: layer 2: 8 heads do not divide width 300" in odd.out


def test_help_names_every_command_and_option(entasis: Ask) -> None:
    assert entasis("--help") == entasis()
    for command in ("shape", "prepare", "train", "compare", "generate"):
        assert f"  {command} " in entasis("--help").out
    answer = entasis("shape", "--help")
    assert answer.status == 0
    for option in [
        "layers",
        "width",
        "heads",
        "kv-heads",
        "head-dim",
        "mlp-ratio",
        "mlp-hidden",
        "bottleneck",
        "turn",
        "multiple",
        "match",
    ]:
        assert f"--{option} " in answer.out
    for option in ["style", "vocab", "context", "json", "list"]:
        assert f"--{option} " in answer.out


def test_the_version(entasis: Ask) -> None:
    answer = entasis("--version")
    assert answer.status == 0
    assert answer.out.startswith("entasis 0.")


# --- as a process -----------------------------------------------------------------------------------------------------


def test_a_reader_that_stops_early_sees_no_traceback() -> None:
    command = f"{sys.executable} -m entasis shape uniform --layers 5000 --width 64 --heads 4 | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("layer")
    assert done.stderr == ""


def cpu_seconds(arguments: list[str]) -> float:
    """Processor time of one run: unlike the clock, it does not depend on what else the machine does."""
    process = subprocess.Popen([sys.executable, "-m", "entasis", *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(("arguments", "limit"), [(["--help"], 0.5), (["shape", *BOWTIE], 1.0)], ids=["help", "shape"])
def test_it_answers_at_once(arguments: list[str], limit: float) -> None:
    """The promise is for a quiet machine; processor time is what such a machine would need."""
    assert statistics.median(cpu_seconds(arguments) for _ in range(3)) < limit
