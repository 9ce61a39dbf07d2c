"""A person's own family, from a file that a configuration or a command names."""

from __future__ import annotations

from pathlib import Path

import pytest

import entasis
from entasis.errors import ConfigError
from entasis.run.config import parse_config
from entasis.shape.plugins import load_plugin
from entasis.shape.registry import FAMILIES

_FILE = '''
from entasis.shape.columns import column
from entasis.shape.profiles import linear, profile
from entasis.shape.records import LayerShape, Shape
from entasis.shape.registry import Design, register_family


@profile("test-ramp")
def ramp(layers, start):
    return linear(layers, start, 1.0)


@register_family("test-ramp")
def ramp_family(*, layers: int, width: int, start: float = 0.5, config) -> Design:
    """An MLP that grows on a line."""
    shares = ramp(layers, start)
    shape = Shape(tuple(LayerShape(width, 2, 2, width // 2, round(4 * share * width)) for share in shares), width)
    return Design("test-ramp", shape, column(layers, width, 2))
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for registry in (FAMILIES,):
        monkeypatch.setattr("entasis.shape.registry.FAMILIES", dict(registry))
    file = tmp_path / "my_shapes.py"
    file.write_text(_FILE, encoding="utf-8")
    return file


def test_a_file_adds_a_family(plugin: Path) -> None:
    load_plugin(str(plugin))
    load_plugin(str(plugin))  # once is enough
    shape = entasis.family("test-ramp", layers=3, width=16)
    assert [layer.mlp_hidden for layer in shape.layers] == [32, 48, 64]
    with pytest.raises(ConfigError, match="start: expected a valid number"):
        entasis.family("test-ramp", layers=3, width=16, start="half")


def test_a_configuration_names_the_file(plugin: Path) -> None:
    config = parse_config(
        {
            "data": {"path": "x"},
            "plugins": [str(plugin)],
            "shape": {"family": "test-ramp", "layers": 2, "width": 16},
            "train": {"steps": 1},
            "out": "x",
        }
    )
    assert config.design(100).family == "test-ramp"


@pytest.mark.parametrize(("text", "line"), [("1 / 0", "ZeroDivisionError"), ("def", "SyntaxError")])
def test_a_file_that_fails_is_one_line(text: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"broken.py: {line}"):
        load_plugin(str(file))
    with pytest.raises(ConfigError, match="no such file"):
        load_plugin(str(tmp_path / "none.py"))
