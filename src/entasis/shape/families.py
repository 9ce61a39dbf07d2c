"""All families that come with the package. Importing this registers them; the best-known ones are functions here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from entasis.shape import columns, prisms, tapers, waists  # noqa: F401 - each registers its families
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import Shape
from entasis.shape.registry import PerLayer, family


def uniform(*, layers: int, width: int, heads: int, config: ModelConfig | None = None, **settings: Any) -> Shape:  # noqa: ANN401
    """Every layer alike. Further settings: kv_heads, head_dim, mlp_ratio (4), mlp_hidden. Raises as `family`."""
    return family("uniform", config=config, layers=layers, width=width, heads=heads, **settings)


def prism(*, width: int, heads: PerLayer, config: ModelConfig | None = None, **settings: Any) -> Shape:  # noqa: ANN401
    """Head counts per layer at constant width. Further settings: layers, kv_heads, baseline_heads, early_head_dim,
    hold (3), baseline_share (0.5), mlp_ratio (4), mlp_hidden. Raises as `family`."""
    return family("prism", config=config, width=width, heads=heads, **settings)


def bowtie(*, layers: int, width: int, heads: int, config: ModelConfig | None = None, **settings: Any) -> Shape:  # noqa: ANN401
    """Wide ends, narrow waist, at the effective parameters of the uniform shape of `width`. Further settings:
    bottleneck (0.3), turn (0.75 of the layers), multiple (32), progression ("geometric"), permute, match
    ("effective"), kv_heads, head_dim, mlp_ratio (4), mlp_hidden. Raises as `family`."""
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
