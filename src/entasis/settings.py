"""Settings that people write: YAML in (data only), checked against types, and every fault told in one line.

YAML here has no tags and no repeated keys, its aliases stay within bounds, 3e-3 is a number and 2026-01-31 a text.
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
import reprlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from entasis.errors import ConfigError

_MOST_VALUES = 1_000_000
"""In one text, aliases written out: ten lines of aliases to aliases can stand for billions of values."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses tags, repeated keys (which YAML silently overwrites) and aliases without bounds."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = 0
        self._values_of_anchor: dict[str, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        if getattr(event, "tag", None) is not None:
            problem = f"tag {event.tag!r} is not allowed; settings are plain data"
            raise yaml.composer.ComposerError(None, None, problem, mark)
        before = self._values
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._values_of_anchor:
                raise yaml.composer.ComposerError(None, None, f"{event.anchor!r} holds itself", mark)
            self._values += self._values_of_anchor[event.anchor]
        else:
            self._values += 1
            if event.anchor is not None:
                self._values_of_anchor[event.anchor] = self._values - before
        if self._values > _MOST_VALUES:
            problem = f"more than {_MOST_VALUES:,} values, aliases written out"
            raise yaml.composer.ComposerError(None, None, problem, mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *defaults`; keys beside it may override
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
                seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes texts which the loader would take for numbers, and escapes every kind of line end."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = '"' if re.search("[\r\x85\u2028\u2029]", text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
# Nothing here is a date, so 2026-01-31 stays a text.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
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
        ConfigError: the text is not YAML, or holds a tag, a repeated key or unbounded aliases; names the line.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f": line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{source}{place}: {what}") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}") from None


def parse_json(text: str, source: str) -> Any:  # noqa: ANN401 - any plain data
    """Plain data from JSON text; `source` names it in errors.

    Raises:
        ConfigError: the text is not JSON, or holds a repeated key.
    """

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key, value in pairs:
            if key in data:
                raise ConfigError(f"{source}: {shorten(key)} is given twice")
            data[key] = value
        return data

    try:
        return json.loads(text, object_pairs_hook=mapping)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source}: line {error.lineno}, column {error.colno}: {error.msg.lower()}") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{source}: not JSON: {error}") from None


def to_yaml(data: Mapping[str, Any]) -> str:
    """Plain data as YAML text; `parse_yaml` gives it back as it was."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file (or `.json`) that holds one mapping with names as keys.

    Raises:
        ConfigError: the file is missing, unreadable, no YAML or no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        inside = path / "config.yaml"
        hint = f"; the configuration of the run in it is {inside}" if inside.is_file() else ""
        raise ConfigError(f"{path}: {(error.strerror or 'cannot be read').lower()}{hint}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    data = parse_json(text, str(path)) if path.suffix == ".json" else parse_yaml(text, str(path))
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
                checked[name] = _adapter(hints.get(name, Any)).validate_python(values[name])
            except ValidationError as error:
                raise ConfigError(one_line(error, name)) from None
        elif parameters[name].default is inspect.Parameter.empty:
            raise ConfigError(f"{name}: missing; {owner} needs it")
    return checked


def one_line(error: ValidationError, prefix: str = "") -> str:
    """The first problem of a pydantic report as `field.name: what is wrong, got value`."""
    # Of a union's complaints, the deepest place is the one that the user meant, and of equally deep ones that which
    # is about the value and not about its kind.
    problem = max(error.errors(), key=lambda each: (len(each["loc"]), each["type"] not in _OF_ANOTHER_KIND))
    if problem["type"] in {"model_type", "model_attributes_type"}:
        return (
            f"{'.'.join(map(str, problem['loc']))}: expected settings as `name: value`; got {shorten(problem['input'])}"
        )
    place = ".".join(str(part) for part in problem["loc"] if not _is_branch(part))
    where = ".".join(part for part in (prefix, place) if part)
    if problem["type"] == "value_error":
        return f"{where}: {problem['ctx']['error']}" if where else str(problem["ctx"]["error"])
    if problem["type"] == "missing":
        return f"{where}: missing"
    message = problem["msg"][0].lower() + problem["msg"][1:]
    for pydantic_words, words in _PLAIN_WORDS:
        message = message.replace(pydantic_words, words)
    return f"{where}: {message}; got {shorten(problem['input'])}"


def is_text(value: str) -> bool:
    """Whether a string is text: command lines and JSON can bring half surrogate pairs, which no file can hold."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def shorten(value: object) -> str:
    """`repr` for an error line: what is long or deep is cut."""
    text = _REPR.repr(value)
    return text if len(text) <= _LONGEST_REPR else text[: _LONGEST_REPR - 1] + "…"


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the nearest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


_PLAIN_WORDS = (
    ("input should be", "expected"),
    ("an instance of Sequence", "a list"),
    ("'str' instances are not allowed as a Sequence value", "expected a list"),
    ("an instance of Mapping", "an object"),
    ("a valid integer", "a whole number"),
    (" after validation,", ","),
)
_OF_ANOTHER_KIND = {"literal_error", "none_required"}
_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = 8
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60
_REPR.maxlevel = 3
_LONGEST_REPR = 200


def _adapter(annotation: Any) -> TypeAdapter[Any]:  # noqa: ANN401 - an annotation is any object
    return TypeAdapter(annotation, config=ConfigDict(strict=True))


def _is_branch(part: int | str) -> bool:
    """Pydantic names the branch of a union in the location (`int`, `list[int]`); fields are plain identifiers."""
    return isinstance(part, str) and (part in {"int", "float", "str", "bool", "none"} or not part.isidentifier())
