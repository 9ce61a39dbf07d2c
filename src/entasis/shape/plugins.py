"""Families and profiles from outside the package: from a Python file that a person names, or from an installed package.

A file registers what it defines with `@register_family` and `@profile`. A package lists a module of that kind under the
entry-point group `entasis.shapes`. A named file is run as a program is: name only files that you trust.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from entasis.errors import ConfigError

ENTRY_POINT_GROUP = "entasis.shapes"


def load_plugin(file: str) -> None:
    """Runs a Python file once, so that it can register its families and profiles.

    Raises:
        ConfigError: the file is missing, or fails; names the file and the error.
    """
    path = Path(file).resolve()
    if not path.is_file():
        raise ConfigError(f"plugins: {file}: no such file")
    name = f"entasis_plugin_{path.stem}_{abs(hash(path))}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"plugins: {file}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a person's file raises is told with its name
        del sys.modules[name]
        raise ConfigError(f"plugins: {file}: {type(error).__name__}: {error}") from error


@cache
def load_installed() -> None:
    """Imports every installed module that is listed under the entry-point group, once.

    Raises:
        ConfigError: one of them fails; names the package.
    """
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            point.load()
        except Exception as error:  # as above
            raise ConfigError(f"plugin {point.name} ({point.value}): {type(error).__name__}: {error}") from error
