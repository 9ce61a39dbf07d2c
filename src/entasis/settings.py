"""Settings that people write: YAML in (data only), checked against types, and every fault told in one line.

YAML here has no tags and no repeated keys, and 3e-3 is a number.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from entasis.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """SafeLoader that also refuses repeated keys, which YAML silently overwrites."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
                seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes texts which the loader would take for numbers."""


# YAML 1.1 wants a dot and a signed exponent in a float; people write 3e-3.
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
        list("-+0123456789."),
    )


def parse_yaml(text: str, source: str) -> Any:  # noqa: ANN401 - any plain data
    """Plain data from YAML text; `source` names it in errors.

    Raises:
        ConfigError: the text is not YAML, or holds a tag (data only) or a repeated key; names the line.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{source}:{place}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}") from None


def to_yaml(data: Mapping[str, Any]) -> str:
    """Plain data as YAML text; `parse_yaml` gives it back as it was."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds one mapping with names as keys.

    Raises:
        ConfigError: the file is missing, unreadable, no YAML or no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {(error.strerror or 'cannot be read').lower()}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{path}: expected settings as `name: value` lines")
    return data


def check_arguments(
    function: Callable[..., Any], values: Mapping[str, Any], *, known: Iterable[str], owner: str
) -> dict[str, Any]:
    """Checks keyword arguments against a function's annotations.

    Raises:
        ConfigError: a name is unknown or missing, or a value has another type; one line that names it.
    """
    known = tuple(known)
    parameters = inspect.signature(function).parameters
    hints = get_type_hints(function)
    for name in values:
        if name not in known:
            raise ConfigError(f"{name}: {owner} has no such setting{nearest(name, known)}; it takes {', '.join(known)}")
    checked = {}
    for name in known:
        if name in values:
            try:
                checked[name] = TypeAdapter(hints[name], config=ConfigDict(strict=True)).validate_python(values[name])
            except ValidationError as error:
                raise ConfigError(one_line(error, name)) from None
        elif parameters[name].default is inspect.Parameter.empty:
            raise ConfigError(f"{name}: missing; {owner} needs it")
    return checked


def one_line(error: ValidationError, prefix: str = "") -> str:
    """The first problem of a pydantic report as `field.name: what is wrong, got value`."""
    # Of a union's complaints, the deepest place is the one that the user meant.
    problem = max(error.errors(), key=lambda each: len(each["loc"]))
    place = ".".join(str(part) for part in problem["loc"] if not _is_branch(part))
    where = ".".join(part for part in (prefix, place) if part)
    if problem["type"] == "value_error":
        return f"{where}: {problem['ctx']['error']}" if where else str(problem["ctx"]["error"])
    if problem["type"] == "missing":
        return f"{where}: missing"
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{where}: {message.replace('input should be', 'expected')}; got {problem['input']!r}"


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the nearest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _is_branch(part: int | str) -> bool:
    """Pydantic names the branch of a union in the location (`int`, `list[int]`); fields are plain identifiers."""
    return isinstance(part, str) and (part in {"int", "float", "str", "bool", "none"} or not part.isidentifier())
