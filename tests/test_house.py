"""The house: which room may import which, what stays light, and what every source file looks like."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import entasis

PACKAGE = Path(entasis.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Arrows point down: a room may import the rooms of lower floors, and itself.
FLOORS = [
    {"shape"},
    {"model"},
    {"run", "generate"},
    {"evaluate", "analyze", "hub"},
    {"train"},
    {"study", "bench"},
    {"cli"},
]
BESIDE: dict[str, set[str]] = {"data": set(), "report": {"shape"}}
"""On the ground beside shape, with what they may import: a report draws shapes. The model knows neither."""
ROOMS = {room for floor in FLOORS for room in floor} | set(BESIDE)
FOR_ALL = {"errors", "settings"}
"""Root modules that every room may import; they import no room."""

HEAVY = ("torch", "transformers", "matplotlib", "scipy", "tokenizers", "numpy", "pandas", "pyarrow", "datasets")


def room_of(path: Path) -> str | None:
    """The room of a file; None for the modules beside the rooms."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


def imported_modules(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, late imports and those for type checkers included."""
    module = ".".join(("entasis", *path.relative_to(PACKAGE).with_suffix("").parts))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *([base] if base else [])])
            yield base
            if base == "entasis":
                yield from (f"entasis.{alias.name}" for alias in node.names)


def imported_rooms(path: Path) -> set[str]:
    """First names below `entasis` of what a file imports."""
    parts = [name.split(".") for name in imported_modules(path)]
    return {each[1] for each in parts if each[0] == "entasis" and len(each) > 1}


def rooms_below(room: str) -> set[str]:
    """What a room may import."""
    if room in BESIDE:
        return BESIDE[room]
    floor = next(number for number, rooms in enumerate(FLOORS) if room in rooms)
    below = {other for rooms in FLOORS[:floor] for other in rooms}
    return below | set(BESIDE) if room not in {"shape", "model"} else below


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_every_room_has_its_floor() -> None:
    rooms = {room_of(path) for path in FILES} - {None, "presets"}
    assert rooms <= ROOMS, "a new room needs its floor here"
    assert {"shape", "model", "data", "cli"} <= rooms


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_arrows_point_down(path: Path) -> None:
    room = room_of(path)
    if room is None:
        return
    for other in imported_rooms(path) - FOR_ALL - {room}:
        if other not in ROOMS:  # a name of the package itself
            assert other == "__version__", f"{name_of(path)} takes {other} from the package's front door"
            continue
        assert other in rooms_below(room), f"{name_of(path)} imports from {other}, which is not below {room}"


@pytest.mark.parametrize("name", sorted(FOR_ALL))
def test_what_all_rooms_import_imports_no_room(name: str) -> None:
    assert imported_rooms(PACKAGE / f"{name}.py") <= FOR_ALL


def test_the_ground_floor_knows_no_torch() -> None:
    for path in FILES:
        if room_of(path) in {"shape", None}:
            roots = {name.split(".")[0] for name in imported_modules(path)}
            assert not roots & set(HEAVY), name_of(path)


def modules_after(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after a statement."""
    code = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_imports_next_to_nothing() -> None:
    loaded = modules_after("import entasis")
    assert not loaded & {*HEAVY, "pydantic", "yaml", "typer", "rich"}


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    loaded = modules_after("import entasis.cli.main")
    assert not loaded & {*HEAVY, "pydantic", "yaml"}


def test_designing_shapes_imports_no_torch() -> None:
    shape_modules = [f"entasis.shape.{path.stem}" for path in FILES if room_of(path) == "shape"]
    assert len(shape_modules) > 8
    loaded = modules_after(f"import {', '.join(shape_modules)}; import entasis; entasis.bowtie; entasis.Budget")
    assert not loaded & set(HEAVY)


def test_public_names_are_loaded_when_they_are_used() -> None:
    for name in entasis.__all__:
        assert getattr(entasis, name) is not None
    assert set(entasis.__all__) <= set(dir(entasis))
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        entasis.nothing_of_the_kind  # noqa: B018


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_file_says_what_it_is_for_and_is_read_in_one_sitting(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring and len(docstring) > 20, "opens with a docstring"
    assert text.count("\n") <= 350


ABSOLUTE = re.compile(r"(?<![\w.~:/<>*-])/(?:work|home|root|tmp|usr|var|etc|opt|mnt|srv|data|Users|private)(?:/|\b)")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_knows_a_place_on_a_machine(path: Path) -> None:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        assert not ABSOLUTE.search(line), f"line {number}: {line.strip()}"


def test_the_check_for_places_can_fail() -> None:
    for line in ('open("/tmp/x")', "see /srv/entasis", "Path('/home/me')"):
        assert ABSOLUTE.search(line)
    for line in ("https://a.org/data/x", "train/data/x", "tokens/s", "data/example", "a / data"):
        assert not ABSOLUTE.search(line)
