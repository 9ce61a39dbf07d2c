"""RunConfig: everything that decides a run. Validated completely before any data is opened.

A configuration is a YAML file; every key can be set on the command line as `section.key=value`. The resolved
configuration, defaults written out, is saved in the run folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from entasis.errors import ConfigError, EntasisError
from entasis.run.presets import read_inherited
from entasis.run.sections import (
    DataSection,
    FilePath,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    ScheduleSection,
    Section,
    TrackSection,
    TrainSection,
)
from entasis.run.study_sections import CompareSection, TransferSection
from entasis.settings import nearest, one_line, parse_yaml, to_yaml
from entasis.shape.families import design, family_settings
from entasis.shape.model_config import ModelConfig
from entasis.shape.plugins import load_plugin
from entasis.shape.registry import Design
from entasis.shape.rules import require_no_errors

_SHARED_MODEL = ("context", "causal")
"""Settings of the model that all shapes of a comparison share: with others they would not see the same batches."""
MASK_SHARE = 0.3
"""Of the tokens, what is hidden from an encoder unless `train.mask_share` says otherwise."""


class RunConfig(Section):
    """A run, whole."""

    data: DataSection
    model: ModelSection = ModelSection()
    plugins: list[str] = Field(default_factory=list)
    """Python files with families and profiles of one's own; each is run."""
    shape: dict[str, Any]
    """`family` and its settings."""
    train: TrainSection
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    track: TrackSection = TrackSection()
    parallel: ParallelSection = ParallelSection()
    out: FilePath
    compare: CompareSection | None = None
    transfer: TransferSection | None = None

    @property
    def batch_sequences(self) -> int:
        """Sequences of one optimizer step."""
        return self.train.batch_tokens // self.model.context

    @property
    def mask_share(self) -> float | None:
        """Share of the tokens that is hidden and to be predicted; None: causal, every next token is."""
        return None if self.model.causal else self.train.mask_share or MASK_SHARE

    def block(self, vocab_size: int) -> ModelConfig:
        """The block with the data's vocabulary; an encoder's has one id more, the last, which marks what is hidden."""
        ids = vocab_size if self.model.causal else vocab_size + 1
        return ModelConfig.from_dict({"vocab_size": ids, **self.model.model_dump()})

    def design(self, vocab_size: int) -> Design:
        """The shape with its reference; its errors are raised as ConfigErrors of the section `shape`."""
        settings = dict(self.shape)
        name = settings.pop("family", None)
        if not isinstance(name, str):
            raise ConfigError("shape.family: missing; name a family (see `entasis shape --list`)")
        try:
            made = design(name, settings, self.block(vocab_size))
            require_no_errors(made.findings)
        except ConfigError as error:
            raise ConfigError(f"shape.{error}") from None
        except EntasisError as error:
            raise ConfigError(f"shape: {error}") from None
        return made

    def for_shape(self, name: str) -> RunConfig:
        """This configuration with the compared shape `name` merged over `shape`, and its `model` over `model`.

        Inherited settings that the shape's family does not know are dropped; unknown ones of its own stay, and are
        errors when the shape is built.

        Raises:
            ConfigError: the shape has a setting of the model that does not fit, or that all shapes have to share.
        """
        assert self.compare is not None
        own = dict(self.compare.shapes[name])
        model = self._model_of(name, own.pop("model", {}))
        family = own.get("family", self.shape.get("family"))
        inherited = {
            key: value
            for key, value in self.shape.items()
            if isinstance(family, str) and key in _settings_of(family, name) and key not in own
        }
        return self.model_copy(
            update={"model": model, "shape": {"family": family, **inherited, **own}, "compare": None}
        )

    def _model_of(self, name: str, own: Any) -> ModelSection:  # noqa: ANN401 - as a person wrote it
        where = f"compare.shapes.{name}.model"
        if not isinstance(own, dict):
            raise ConfigError(f"{where}: expected settings of the section `model`, got {own!r}")
        for key in _SHARED_MODEL:
            if key in own:
                raise ConfigError(f"{where}.{key}: shapes can only be compared with one {key}; set it under model")
        try:
            return ModelSection.model_validate(self.model.model_dump() | own)
        except ValidationError as error:
            raise ConfigError(_unknown_name(error, ModelSection, f"{where}.") or f"{where}.{one_line(error)}") from None

    def to_yaml(self) -> str:
        """The resolved configuration; `load_config` reads it back to an equal one."""
        return to_yaml(self.model_dump(mode="json"))

    @model_validator(mode="after")
    def _sizes_agree(self) -> RunConfig:
        if problem := self.data.problem():
            raise ValueError(problem)
        if self.model.causal and self.train.mask_share is not None:
            raise ValueError(
                f"train.mask_share {self.train.mask_share} is for encoders, and model.causal is true; remove it, or "
                "set model.causal to false"
            )
        if not self.model.causal and self.compare is not None and self.compare.match.by == "kv":
            raise ValueError(
                "compare.match.by kv: an encoder (model.causal false) keeps no cache of keys and values; match by "
                "effective, parameters or flops"
            )
        if self.optimizer.name == "muon" and self.parallel.strategy in {"fsdp", "hybrid"}:
            raise ValueError(
                "optimizer.name muon: it orthogonalises whole matrices, and under parallel.strategy "
                f"{self.parallel.strategy} each rank has a part of them; choose parallel.strategy ddp, or adamw"
            )
        train, context = self.train, self.model.context
        if train.batch_tokens % context:
            raise ValueError(
                f"train.batch_tokens {train.batch_tokens} is no multiple of model.context {context}; "
                f"near choices: {max(1, train.batch_tokens // context) * context}"
            )
        if self.batch_sequences % train.micro_batch:
            raise ValueError(
                f"train.micro_batch {train.micro_batch} does not divide the {self.batch_sequences} sequences of a step "
                f"(train.batch_tokens {train.batch_tokens} / model.context {context})"
            )
        return self


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A configuration file, or a preset by name, with `section.key=value` settings over it, validated completely.

    Raises:
        ConfigError: one line that names the field.
    """
    data = read_inherited(source)
    for override in overrides:
        _set(data, override)
    config = parse_config(data)
    _require_experts(config)
    return config


def parse_config(data: Mapping[str, Any]) -> RunConfig:
    """A configuration from plain data, validated completely, every compared shape included.

    Raises:
        ConfigError: one line that names the field.
    """
    try:
        config = RunConfig.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError(_unknown_name(error, RunConfig) or one_line(error)) from None
    for plugin in config.plugins:
        load_plugin(plugin)
    # No rule about shapes depends on the vocabulary, so that this needs no data.
    config.design(vocab_size=256)
    for name in config.compare.shapes if config.compare else ():
        own = config.for_shape(name)
        try:
            own.design(vocab_size=256)
        except ConfigError as error:
            raise ConfigError(
                f"compare.shapes.{name}: {str(error).removeprefix('shape.').removeprefix('shape: ')}"
            ) from None
    return config


def _require_experts(config: RunConfig) -> None:
    """Refuses a weight of routers' losses that no shape has, of what a person wrote: of a study, the runs of shapes
    without experts keep the weight of the others in their own configurations."""
    weight = config.train.router_loss
    if weight == TrainSection.model_fields["router_loss"].default:
        return
    configs = [config, *(config.for_shape(name) for name in (config.compare.shapes if config.compare else ()))]
    if not any(layer.experts for each in configs for layer in each.design(vocab_size=256).shape.layers):
        raise ConfigError(
            f"train.router_loss {weight:g}: no layer has experts, whose routers it is for; remove it, or set "
            "shape.experts"
        )


def _settings_of(family: str, shape_name: str) -> tuple[str, ...]:
    try:
        return family_settings(family)
    except ConfigError as error:
        raise ConfigError(f"compare.shapes.{shape_name}: {error}") from None


def _set(data: dict[str, Any], override: str) -> None:
    """Applies `section.key=value`; the value is YAML."""
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise ConfigError(f"-s {override}: expected section.key=value")
    *sections, key = name.split(".")
    place = data
    for section in sections:
        inner = place.setdefault(section, {})
        if inner is None:
            inner = place[section] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"-s {override}: {section} is a value, not a section")
        place = inner
    place[key] = parse_yaml(text, f"-s {name}")


def _unknown_name(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str | None:
    """The line for a key that `model` does not know, with the nearest known one."""
    for problem in error.errors():
        if problem["type"] == "extra_forbidden":
            *sections, key = (str(part) for part in problem["loc"])
            known = _known_names(model, sections)
            where = prefix + ".".join([*sections, key])
            return f"{where}: unknown setting{nearest(key, known)}; known here: {', '.join(known)}"
    return None


def _known_names(model: type[BaseModel], sections: Sequence[str]) -> list[str]:
    """Fields of the section inside `model`; names of a person's own, as those of contrasts, lead into their values."""
    for section in sections:
        if section in model.model_fields:
            model = _section_in(model.model_fields[section].annotation) or model
    return list(model.model_fields)


def _section_in(annotation: Any) -> type[BaseModel] | None:  # noqa: ANN401 - any type
    """The section that a field holds: itself, or optional, or as a dictionary's values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section_in(argument) for argument in getattr(annotation, "__args__", ()))
    return next((section for section in found if section), None)
