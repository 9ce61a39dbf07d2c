"""The sections of a configuration that studies read: what is compared, tuned and transferred."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from entasis.run.sections import Count, Rate, Section, Seed
from entasis.settings import is_text, nearest

ShapeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]
"""A name that is also a folder's: it can point nowhere else."""


class MatchSection(Section):
    """On which budget compared shapes must be equal."""

    by: Literal["effective", "parameters", "flops", "kv"] = "effective"
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01


class TuneSection(Section):
    """The search for each shape's own learning rate."""

    learning_rate: Annotated[list[Rate], Field(min_length=2)]
    seed: Seed = 100
    """A seed that no compared run uses."""


class ContrastSection(Section):
    """Two groups of compared shapes, whose mean losses are compared seed by seed."""

    of: Annotated[list[ShapeName], Field(min_length=1)]
    against: Annotated[list[ShapeName], Field(min_length=1)]


class CompareSection(Section):
    """Read by `entasis compare` only."""

    shapes: Annotated[dict[ShapeName, dict[str, Any]], Field(min_length=1)]
    """Settings over those of `shape`, and under `model` settings over those of `model`."""
    seeds: Annotated[list[Seed], Field(min_length=1, default_factory=lambda: [0, 1, 2])]
    match: MatchSection = MatchSection()
    tune: TuneSection | None = None
    contrasts: dict[ShapeName, ContrastSection] = Field(default_factory=dict)
    """Differences between groups of shapes, beside those to the reference."""
    prompt: str = "In the beginning"
    """What the report's text samples continue."""

    @field_validator("prompt")
    @classmethod
    def _prompt_is_text(cls, prompt: str) -> str:
        if not is_text(prompt):
            raise ValueError("not text that can be written as UTF-8")
        return prompt

    @model_validator(mode="after")
    def _seeds_are_distinct(self) -> CompareSection:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {self.seeds} repeat; each seed is one independent run")
        if self.tune is not None and self.tune.seed in self.seeds:
            raise ValueError(f"tune.seed {self.tune.seed} is also in seeds {self.seeds}; tune on a seed of its own")
        if self.tune is not None and len(set(self.tune.learning_rate)) < len(self.tune.learning_rate):
            raise ValueError(f"tune.learning_rate {self.tune.learning_rate} repeats a rate")
        return self

    @model_validator(mode="after")
    def _contrasts_are_of_shapes(self) -> CompareSection:
        for name, contrast in self.contrasts.items():
            both = [*contrast.of, *contrast.against]
            for shape in both:
                if shape not in self.shapes:
                    raise ValueError(
                        f"contrasts.{name}: {shape} is not among shapes{nearest(shape, self.shapes)}; "
                        f"known here: {', '.join(self.shapes)}"
                    )
                if both.count(shape) > 1:
                    raise ValueError(f"contrasts.{name}: {shape} stands there twice; a shape is on one side, once")
        return self


class TransferSection(Section):
    """Read by `entasis transfer` only: the shapes of `compare` (or the one of `shape`) at several widths and rates."""

    widths: Annotated[list[Count], Field(min_length=2)]
    """In the place of `shape.width`, rising."""
    learning_rate: Annotated[list[Rate], Field(min_length=3)]
    """The grid, rising."""
    seeds: Annotated[list[Seed], Field(min_length=1, default_factory=lambda: [0, 1, 2])]
    base_width: Count | None = None
    """Width at which `model.logit_divisor` and `optimizer.block_rate` hold; elsewhere they follow the width (muP).
    None: the same at every width."""

    @model_validator(mode="after")
    def _ladder_and_grid_rise(self) -> TransferSection:
        for name in ("widths", "learning_rate"):
            values = getattr(self, name)
            if values != sorted(set(values)):
                raise ValueError(f"{name} {values}: expected to rise from one to the next")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {self.seeds} repeat; each seed is one independent run")
        return self
