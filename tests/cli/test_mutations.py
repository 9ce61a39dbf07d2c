"""A thousand wrong configurations: each runs, or ends with one line that names the field, and never in a traceback.

Every key of `RunConfig` is walked, so that a new setting is mutated from its first day.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from entasis.cli.main import run_command
from entasis.errors import EntasisError
from entasis.run.config import RunConfig, load_config, parse_config
from entasis.settings import to_yaml
from entasis.shape.budget import budget
from entasis.shape.families import families

Place = tuple[str | int, ...]

_JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**40, 2**70, -(2**70), 0.5, -0.0, 1.0, 1.5, 1e300, 1e-300,
    float("nan"), float("inf"), -float("inf"), "", " ", "auto", "none", "x" * 300, "1e5", "3", "ü\n\t\0", "\u2028",
    "../x", "/dev/null", "/dev/null/x", "no/such/file", [], [[]], [None], [0], [1, 2], [1, 2, 3], ["a", "b"],
    list(range(300)), {}, {"": {}}, {"a": 1}, {"family": "prism"}, {"a": {"b": [1, {"c": None}]}}, {"widths": [1, 2]},
)  # fmt: skip
_LAYER = {"width": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp_hidden": 32}
_SHAPES: tuple[dict[str, Any], ...] = (
    {"family": "uniform", "layers": 2, "width": 32, "heads": 4},
    {
        "family": "uniform",
        "layers": 2,
        "width": 32,
        "heads": 4,
        "experts": 4,
        "experts_per_token": 2,
        "expert_hidden": 16,
    },
    {"family": "prism", "width": 32, "heads": [2, 4, 4], "mlp_ratio": 2.0},
    {"family": "bowtie", "layers": 4, "width": 48, "heads": 4, "bottleneck": 0.5, "turn": 2, "multiple": 8},
    {"family": "explicit", "embed_width": 24, "layers": [_LAYER, {**_LAYER, "width": 16, "window": 8}]},
)
_SIZES = (1, 2, 3, 4, 5, 8, 12, 15, 16, 17, 32, 48, 64, 100, 128, 256)
"""Sizes that are right one by one, and contradict each other."""
_LARGEST_PARAMETERS, _LARGEST_TOKENS = 300_000, 4096
"""A configuration that is right and beyond this is planned, not trained."""


def _base(data: Path, folder: Path, shape: dict[str, Any] = _SHAPES[0]) -> dict[str, Any]:
    """A configuration that is right and has every key of every section, defaults written out."""
    given: dict[str, Any] = {
        "data": {"path": str(data), "vocab_size": 257},
        "model": {"context": 16},
        "shape": shape,
        "train": {
            "steps": 2,
            "batch_tokens": 128,
            "micro_batch": 2,
            "device": "cpu",
            "precision": "fp32",
            "threads": 1,
        },
        "out": str(folder / "run"),
        "compare": {
            "shapes": {"uniform": {}, "wider": {"family": "uniform", "layers": 2, "width": 64, "heads": 4}},
            "seeds": [0, 1],
            "tune": {"learning_rate": [1e-3, 3e-3], "seed": 9},
            "contrasts": {"narrow": {"of": ["wider"], "against": ["uniform"]}},
        },
        "track": {"wandb": {"project": "p", "mode": "offline"}},
        "transfer": {"widths": [16, 32], "learning_rate": [1e-3, 2e-3, 4e-3], "base_width": 16},
    }
    whole = parse_config(given)
    for name, field in RunConfig.model_fields.items():  # optional sections that are not given above
        sections = [part for part in getattr(field.annotation, "__args__", ()) if _is_section(part)]
        if sections and getattr(whole, name) is None:
            whole = RunConfig.model_validate({**given, name: sections[0]().model_dump(mode="json")})
            given[name] = getattr(whole, name).model_dump(mode="json")
    return whole.model_dump(mode="json")


def _is_section(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, BaseModel)


def _places(data: Any, prefix: Place = ()) -> Iterator[Place]:
    """Every key and every element, inner ones included."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inner:
        yield (*prefix, key)
        yield from _places(value, (*prefix, key))


def _at(data: Any, place: Place) -> Any:
    for key in place:
        data = data[key]
    return data


def _misspelt(name: str, source: random.Random) -> str:
    at = source.randrange(len(name))
    kind = source.randrange(3)
    return name[:at] + name[at + 1 :] if kind == 0 else name[:at] + name[at] + name[at:] if kind == 1 else name + "s"


def _mutate(data: dict[str, Any], place: Place, source: random.Random) -> str:
    """Changes one place; says how."""
    parent, key = _at(data, place[:-1]), place[-1]
    kinds = ["wrong type or range", "removed", "size", "number"]
    if isinstance(parent, dict):
        kinds += ["unknown key"]
    kind = source.choice(kinds)
    value = parent[key]
    if kind == "removed":
        del parent[key]
    elif kind == "unknown key":
        parent[_misspelt(str(key), source)] = parent.pop(key)
    elif kind == "size" and isinstance(value, int):
        parent[key] = source.choice(_SIZES)
    elif kind == "number" and isinstance(value, float | int):
        parent[key] = value * source.choice([-1, 1e-9, 1e9, 0])
    elif place == ("shape", "family"):
        parent[key] = source.choice([*families(), *_JUNK])
    else:
        kind = "wrong type or range"
        parent[key] = copy.deepcopy(source.choice(_JUNK))
    return f"{'.'.join(map(str, place))}: {kind}"


def _names(place: Place) -> set[str]:
    """The words of which one must stand in the line: a key on the way to the place."""
    return {key.removesuffix("s")[:8] for key in place if isinstance(key, str) and len(key) > 1}


def _arguments(file: Path, source: random.Random) -> list[str]:
    """A command for a configuration: any command for a wrong one, training for one that is right and small enough."""
    try:
        config = load_config(file)
        parameters = budget(config.design(257).shape, config.block(257)).parameters
    except EntasisError:
        return [source.choice(["train", "train", "compare", "transfer", "coordinates"]), str(file)]
    if parameters > _LARGEST_PARAMETERS or config.train.batch_tokens > _LARGEST_TOKENS:
        return ["train", str(file), "--plan"]
    return ["train", str(file), *([] if config.train.steps <= 2 else ["-s", "train.steps=1"])]


@pytest.mark.parametrize(("seed", "count"), [(1, 60), pytest.param(2, 1000, marks=pytest.mark.slow)])
def test_mutated_configurations(
    seed: int,
    count: int,
    small_data: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    bases = [_base(small_data, tmp_path, copy.deepcopy(shape)) for shape in _SHAPES]
    source = random.Random(seed)
    order = [(base, place) for base in bases for place in _places(base)]
    source.shuffle(order)
    seen: Counter[str] = Counter()
    wrongs: list[str] = []
    for number in range(count):
        base, place = order[number % len(order)]  # every place in its turn, and now and then others with it
        data, mutated = copy.deepcopy(base), [place]
        while source.random() < 0.25:
            mutated.append(source.choice(list(_places(base))))
        how = []
        for place in mutated:
            try:
                how.append(_mutate(data, place, source))
            except (KeyError, IndexError, TypeError):
                continue  # it went with another one
        file = tmp_path / source.choice(["c.yaml", "c.json", "c.json"])  # YAML is slow to read
        file.write_text(json.dumps(data) if file.suffix == ".json" else to_yaml(data), encoding="utf-8")
        arguments = _arguments(file, source)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        status = run_command(arguments)
        said = capsys.readouterr()
        seen[str(status)] += 1
        words = set[str]().union(*map(_names, mutated))
        wrong = _wrong(status, said.out, said.err, words)
        if wrong:
            wrongs.append(f"{wrong}: {how}: {said.err.strip()}")
    assert not wrongs, "\n".join(wrongs)
    assert seen["0"] > count / 20, f"hardly anything ran: {seen}"
    assert seen["2"] > count / 4, f"hardly anything was refused: {seen}"


def _wrong(status: int, out: str, err: str, words: set[str]) -> str | None:
    """What is wrong with how a command ended."""
    lines = err.splitlines()
    found = {
        "status": status not in (0, 1, 2),
        "traceback": "Traceback" in out + err,
        "said although it ran": status == 0 and err,
        "not one line": status and len(lines) != 1,
        "not expected": status and ("unexpected" in err or not err.startswith("error: ")),
        "long": len(err) > 1000,
        "names no field": status and not any(word in err for word in words),
    }
    return next((what for what, true in found.items() if true), None)


def _sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section that stands in `RunConfig`, however deep, with its dotted name."""

    def walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
        yield prefix, model
        for name, field in model.model_fields.items():
            own_names = "*." if get_origin(field.annotation) is dict else ""
            for part in (field.annotation, *get_args(field.annotation)):
                if _is_section(part):
                    yield from walk(part, f"{prefix}{name}.{own_names}")

    return walk(RunConfig, "")


@pytest.mark.parametrize(("prefix", "model"), list(_sections()), ids=lambda each: each if isinstance(each, str) else "")
def test_an_unknown_key_of_every_section_is_named_with_the_nearest_known(
    prefix: str, model: type[BaseModel], small_data: Path, tmp_path: Path
) -> None:
    base = _base(small_data, tmp_path)
    file = tmp_path / "c.yaml"
    for name in model.model_fields:
        data = copy.deepcopy(base)
        place: Any = data
        where = ""
        for key in prefix.split(".")[:-1]:
            name_there = next(iter(place)) if key == "*" else key
            place = place[name_there]
            where += f"{name_there}."
        wrong = name[:-1] + "_" + name[-1]
        place[wrong] = place.get(name)
        file.write_text(to_yaml(data), encoding="utf-8")
        with pytest.raises(EntasisError) as caught:
            load_config(file)
        line = str(caught.value)
        assert line.startswith(f"{where}{wrong}: unknown setting (did you mean '{name}'?)"), line
