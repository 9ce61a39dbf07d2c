"""Entasis: design, pretrain, compare and look into transformer language models whose shape changes with depth.

Importing this package imports nothing heavy: each public name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from entasis.model.transformer import Transformer
    from entasis.shape.budget import Budget, budget
    from entasis.shape.families import bowtie, explicit, family, prism, uniform
    from entasis.shape.model_config import ModelConfig
    from entasis.shape.records import LayerShape, Shape

__version__ = "0.1.0"

_HOMES = {
    "Budget": "entasis.shape.budget",
    "LayerShape": "entasis.shape.records",
    "ModelConfig": "entasis.shape.model_config",
    "Shape": "entasis.shape.records",
    "Transformer": "entasis.model.transformer",
    "bowtie": "entasis.shape.families",
    "budget": "entasis.shape.budget",
    "explicit": "entasis.shape.families",
    "family": "entasis.shape.families",
    "prism": "entasis.shape.families",
    "uniform": "entasis.shape.families",
}

__all__ = [
    "Budget",
    "LayerShape",
    "ModelConfig",
    "Shape",
    "Transformer",
    "bowtie",
    "budget",
    "explicit",
    "family",
    "prism",
    "uniform",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'entasis' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
