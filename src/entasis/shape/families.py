"""All families by name: finding one, checking a request to it, building its shape. The best-known are functions too."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from entasis.errors import ConfigError
from entasis.settings import check_arguments, nearest
from entasis.shape import columns, prisms, registry, rules, tapers, waists  # noqa: F401 - each registers its families
from entasis.shape.model_config import ModelConfig
from entasis.shape.plugins import load_installed
from entasis.shape.records import Shape
from entasis.shape.registry import PerLayer

_COUNTING_CONFIG = ModelConfig(vocab_size=50_257, context=1024)
"""Where no configuration is given: llama style. The sizes do not matter to families: tables cancel in matching."""
_STRAIGHT = ("uniform", "explicit")
"""Families that may equal their reference without a word."""


def family_settings(name: str) -> tuple[str, ...]:
    """The names of a family's settings."""
    return tuple(parameter for parameter in inspect.signature(_find(name)).parameters if parameter != "config")


def design(name: str, settings: Mapping[str, Any], config: ModelConfig | None = None) -> registry.Design:
    """Builds a family's shape and checks it; error findings are returned, not raised.

    Raises:
        ConfigError: an unknown family or setting, or a value of the wrong type; the line names it.
        ShapeError: no shape exists for these settings.
    """
    build = _find(name)
    config = _COUNTING_CONFIG if config is None else config
    arguments = check_arguments(build, settings, known=family_settings(name), owner=f"family {name}")
    made = build(**arguments, config=config)
    found = [*made.findings, *rules.findings(made.shape, config)]
    if made.shape == made.reference and name not in _STRAIGHT:
        found.append(
            rules.Finding("warning", None, "equals the uniform shape: these settings change nothing with depth")
        )
    return registry.Design(name, made.shape, made.reference, tuple(rules.errors_first(found)))


def family(name: str, *, config: ModelConfig | None = None, **settings: Any) -> Shape:  # noqa: ANN401 - any setting
    """A family's shape by name.

    Raises:
        ConfigError: an unknown family or setting, or a value of the wrong type.
        ShapeError: the settings break a rule; the line names the layer and the numbers.
    """
    made = design(name, settings, config)
    rules.require_no_errors(made.findings)
    return made.shape


def families() -> dict[str, registry.Build]:
    """Every family by name, in alphabetical order: the package's, installed plugins' and those of loaded files."""
    load_installed()
    return dict(sorted(registry.FAMILIES.items()))


def _find(name: str) -> registry.Build:
    known = families()
    if name not in known:
        raise ConfigError(f"family: unknown family {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    return known[name]


def uniform(*, layers: int, width: int, heads: int, config: ModelConfig | None = None, **settings: Any) -> Shape:  # noqa: ANN401
    """Every layer alike. Further settings: kv_heads, head_dim, mlp_ratio (4), mlp_hidden. Raises as `family`."""
    return family("uniform", config=config, layers=layers, width=width, heads=heads, **settings)


def prism(*, width: int, heads: PerLayer, config: ModelConfig | None = None, **settings: Any) -> Shape:  # noqa: ANN401
    """Head counts per layer at constant width. Further settings: layers, kv_heads, baseline_heads, early_head_dim,
    hold (3), baseline_share (0.5), mlp_ratio (4), mlp_hidden. Raises as `family`."""
    return family("prism", config=config, width=width, heads=heads, **settings)


def bowtie(*, layers: int, width: int, heads: int, config: ModelConfig | None = None, **settings: Any) -> Shape:  # noqa: ANN401
    """Wide ends, narrow waist, at the effective parameters of the uniform shape of `width`. Further settings:
    bottleneck (0.3), turn (0.75 of the layers), multiple (32), head_dim_multiple, mlp_multiple (1), progression
    ("geometric"), permute, match ("effective"), kv_heads, head_dim, mlp_ratio (4), mlp_hidden. Raises as `family`."""
    return family("bowtie", config=config, layers=layers, width=width, heads=heads, **settings)


def explicit(
    *,
    layers: Sequence[Mapping[str, Any]],
    embed_width: int,
    config: ModelConfig | None = None,
    unembed_width: int | None = None,
) -> Shape:
    """A shape written out layer by layer. Raises as `family`."""
    return family("explicit", config=config, layers=layers, embed_width=embed_width, unembed_width=unembed_width)
