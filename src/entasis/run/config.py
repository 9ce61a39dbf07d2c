"""RunConfig: everything that decides a run. Validated completely before any data is opened.

A configuration is a YAML file; every key can be set on the command line as `section.key=value`. The resolved
configuration, defaults written out, is saved in the run folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from entasis.errors import ConfigError, EntasisError
from entasis.run.presets import read_inherited
from entasis.settings import is_text, nearest, one_line, parse_yaml, to_yaml
from entasis.shape.families import design, family_settings
from entasis.shape.model_config import (
    Activation,
    AttentionScale,
    Initialisation,
    ModelConfig,
    Norm,
    Positions,
    Resize,
    Style,
)
from entasis.shape.plugins import load_plugin
from entasis.shape.registry import Design
from entasis.shape.rules import require_no_errors

_Count = Annotated[int, Field(ge=1, le=2**40)]
_Path = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")]
_Seed = Annotated[int, Field(ge=0, lt=2**63)]
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]
"""A name that is also a folder's: it can point nowhere else."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class DataSection(_Section):
    """What is read."""

    path: _Path
    """A folder made by `entasis prepare`."""
    vocab_size: _Count | None = None
    """What the data's vocabulary must be; lets a plan be made before there is data. None: whatever the data has."""
    document_mask: bool = False
    """Whether attention and positions stay inside a document; otherwise windows cross documents."""


class ModelSection(_Section):
    """The block (`ModelConfig` without the vocabulary, which comes from the data). None: as the style says."""

    style: Style = "llama"
    context: _Count = 256
    norm: Norm | None = None
    positions: Positions | None = None
    activation: Activation | None = None
    bias: bool | None = None
    tied: bool | None = None
    norm_epsilon: _Rate = 1e-5
    rotary_theta: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 10_000.0
    resize: Resize = "carry"
    attention_scale: AttentionScale = "sqrt"
    embedding_multiplier: _Rate = 1.0
    residual_multiplier: _Rate = 1.0
    logit_divisor: _Rate = 1.0
    initialisation: Initialisation = "scaled"
    causal: bool = True


class TrainSection(_Section):
    """How long, on what, how often."""

    steps: _Count
    batch_tokens: _Count = 8192
    """Tokens of one optimizer step, over all ranks."""
    micro_batch: _Count = 16
    """Sequences of one forward and backward pass on one rank."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto: bf16 where the device computes in it."""
    compile: bool = False
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """CPU threads; part of what bit equality is promised for."""
    seed: _Seed = 0
    """Of initialisation and data order."""
    router_loss: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    """Weight of the routers' auxiliary loss in what is trained; of no effect without experts."""
    evaluate_every: _Count = 50
    evaluate_tokens: _Count = 65_536
    checkpoint_every: _Count = 50
    keep_checkpoints: _Count = 3


class OptimizerSection(_Section):
    """AdamW for all, or Muon for the blocks' matrices and AdamW for the rest."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: _Rate = 3e-3
    block_rate: _Rate = 1.0
    """Rate of the blocks' matrices / `learning_rate`. The published ><former recipe (muP) has 1/8."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    epsilon: Annotated[float, Field(ge=1e-16, allow_inf_nan=False)] = 1e-8
    clip: _Rate | None = 1.0
    """Largest global norm of the gradient; null: no clipping."""


class ScheduleSection(_Section):
    """The learning rate over time, as a share of `optimizer.learning_rate`."""

    name: Literal["cosine", "constant", "wsd", "power"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0, le=2**40)] = 20
    decay_steps: Annotated[int, Field(ge=0, le=2**40)] | None = None
    """wsd only: steps of the final decay; null: a fifth of the run."""
    final_ratio: _Share = 0.1
    """Share of the rate at the end of cosine and wsd."""
    power_scale: _Rate = 4.0
    """power only: a / sequences of a step in the rate min(learning_rate, a tokens^exponent)."""
    power_exponent: Annotated[float, Field(lt=0, allow_inf_nan=False)] = -0.566
    """power only."""

    @model_validator(mode="after")
    def _decay_is_of_wsd(self) -> ScheduleSection:
        if self.decay_steps is not None and self.name != "wsd":
            raise ValueError(f"decay_steps is a setting of wsd, and the schedule is {self.name}; remove one")
        return self


class MatchSection(_Section):
    """On which budget compared shapes must be equal."""

    by: Literal["effective", "parameters", "flops", "kv"] = "effective"
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01


class TuneSection(_Section):
    """The search for each shape's own learning rate."""

    learning_rate: Annotated[list[_Rate], Field(min_length=2)]
    seed: _Seed = 100
    """A seed that no compared run uses."""


class CompareSection(_Section):
    """Read by `entasis compare` only."""

    shapes: Annotated[dict[_Name, dict[str, Any]], Field(min_length=1)]
    seeds: Annotated[list[_Seed], Field(min_length=1)] = [0, 1, 2]
    match: MatchSection = MatchSection()
    tune: TuneSection | None = None
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


class RunConfig(_Section):
    """A run, whole."""

    data: DataSection
    model: ModelSection = ModelSection()
    plugins: list[str] = []
    """Python files with families and profiles of one's own; each is run."""
    shape: dict[str, Any]
    """`family` and its settings."""
    train: TrainSection
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    out: _Path
    compare: CompareSection | None = None

    @property
    def batch_sequences(self) -> int:
        """Sequences of one optimizer step."""
        return self.train.batch_tokens // self.model.context

    def block(self, vocab_size: int) -> ModelConfig:
        """The block with the data's vocabulary."""
        return ModelConfig(vocab_size=vocab_size, **self.model.model_dump())

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
        """This configuration with the compared shape `name` merged over `shape`.

        Inherited settings that the shape's family does not know are dropped; unknown ones of its own stay, and are
        errors when the shape is built.
        """
        assert self.compare is not None
        own = self.compare.shapes[name]
        family = own.get("family", self.shape.get("family"))
        inherited = {
            key: value
            for key, value in self.shape.items()
            if isinstance(family, str) and key in _settings_of(family, name) and key not in own
        }
        return self.model_copy(update={"shape": {"family": family, **inherited, **own}, "compare": None})

    def to_yaml(self) -> str:
        """The resolved configuration; `load_config` reads it back to an equal one."""
        return to_yaml(self.model_dump(mode="json"))

    @model_validator(mode="after")
    def _sizes_agree(self) -> RunConfig:
        if not self.model.causal:
            raise ValueError(
                "model.causal: an encoder would see the tokens that it is to predict; training has the next-token "
                "objective only, so set it to true (encoders can be built and counted from Python)"
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
    return parse_config(data)


def parse_config(data: Mapping[str, Any]) -> RunConfig:
    """A configuration from plain data, validated completely, every compared shape included.

    Raises:
        ConfigError: one line that names the field.
    """
    try:
        config = RunConfig.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError(_unknown_name(error) or one_line(error)) from None
    for plugin in config.plugins:
        load_plugin(plugin)
    # No rule about shapes depends on the vocabulary, so that this needs no data.
    config.design(vocab_size=256)
    for name in config.compare.shapes if config.compare else ():
        try:
            config.for_shape(name).design(vocab_size=256)
        except ConfigError as error:
            raise ConfigError(
                f"compare.shapes.{name}: {str(error).removeprefix('shape.').removeprefix('shape: ')}"
            ) from None
    return config


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


def _unknown_name(error: ValidationError) -> str | None:
    """The line for an unknown key, with the nearest known one."""
    for problem in error.errors():
        if problem["type"] == "extra_forbidden":
            *sections, key = (str(part) for part in problem["loc"])
            known = _known_names(sections)
            return f"{'.'.join([*sections, key])}: unknown setting{nearest(key, known)}; known here: {', '.join(known)}"
    return None


def _known_names(sections: Sequence[str]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for section in sections:
        for candidate in (
            model.model_fields[section].annotation,
            *getattr(model.model_fields[section].annotation, "__args__", ()),
        ):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                model = candidate
                break
    return list(model.model_fields)
