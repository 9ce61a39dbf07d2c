"""Configurations that inherit: a file, or a preset of the package by name, over the ones that it names.

`inherits: NAME` takes another preset, or a file beside this one, as the ground; sections are merged key by key, and the
inheriting file wins. Presets whose names start with an underscore are grounds only.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from entasis.errors import ConfigError
from entasis.settings import nearest, read_yaml

_SUFFIXES = {".yaml", ".yml", ".json"}
_FOLDER = Path(str(resources.files("entasis") / "presets"))


def preset_names() -> list[str]:
    """The presets that a person can name, in alphabetical order."""
    return sorted(path.stem for path in _FOLDER.glob("[!_]*.yaml"))


def preset_summary(name: str) -> str:
    """A preset's first comment line."""
    first = (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip()


def read_inherited(source: str | Path) -> dict[str, Any]:
    """The settings of a file or preset, merged over those that it inherits.

    Raises:
        ConfigError: there is no such file or preset, it is not YAML, or it inherits itself.
    """
    return _read(_resolve(str(source), beside=None), ())


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path in seen:
        raise ConfigError(f"{path}: inherits: {' -> '.join(each.stem for each in (*seen, path))} goes in a circle")
    data = read_yaml(path)
    ground = data.pop("inherits", None)
    if ground is None:
        return data
    if not isinstance(ground, str):
        raise ConfigError(f"{path}: inherits: expected the name of a preset or a file, got {ground!r}")
    return _merged(_read(_resolve(ground, beside=path), (*seen, path)), data)


def _resolve(name: str, beside: Path | None) -> Path:
    """The file of a preset, or the file itself (relative to the one that names it)."""
    preset = _FOLDER / f"{name}.yaml"
    if name.replace("-", "").replace("_", "").isalnum() and preset.is_file():
        return preset
    path = Path(name) if beside is None else beside.parent / name
    if path.suffix not in _SUFFIXES and not path.exists():
        close = nearest(name, preset_names())
        raise ConfigError(f"{name}: no such file or preset{close}; `entasis shape --list` names the presets")
    return path


def _merged(ground: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(ground)
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged
