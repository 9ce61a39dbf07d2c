"""The sections of a configuration: what each setting is called, which values it takes, and what it is unless given."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from entasis.errors import ConfigError
from entasis.settings import is_text
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
from entasis.shape.rotary_scaling import RotaryScaling

ActivationCheckpointing = Literal["none", "block", "selective"]
Count = Annotated[int, Field(ge=1, le=2**40)]
FilePath = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of a configuration: plain data, strictly typed, unknown keys refused, not changed after it is made."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


DataFormat = Literal["entasis", "nanogpt", "llmc", "megatron"]
_HeldOut = FilePath | Annotated[float, Field(gt=0, lt=1)]
_TokenId = Annotated[int, Field(ge=0, lt=2**32)]


class SourceSection(Section):
    """One source of a mixture."""

    path: FilePath
    """A folder made by `entasis prepare`, here or at an address that fsspec reads; of another format a file or glob."""
    format: DataFormat = "entasis"
    """Whose files these are."""
    held_out: _HeldOut | None = None
    """Other formats only: the held-out files, or the share that is cut off the end; None: 0.01."""
    eos_id: _TokenId | None = None
    """Other formats only: the id between documents. None: it is not known."""
    weight: Rate = 1.0
    """Share of the sequences, relative to those of the other sources."""


class DataSection(Section):
    """What is read: one source, or several mixed by weight."""

    path: Annotated[str, Field(pattern=r"^[^\x00]*$")] = ""
    """As in `SourceSection`, and so the next three; empty where there is a mixture."""
    format: DataFormat = "entasis"
    held_out: _HeldOut | None = None
    eos_id: _TokenId | None = None
    mixture: Annotated[list[SourceSection], Field(min_length=1)] | None = None
    """In the place of `path`."""
    vocab_size: Count | None = None
    """What the data's vocabulary must be; lets a plan be made before there is data. None: whatever the data has, which
    files of other programs do not say."""
    document_mask: bool = False
    """Whether attention and positions stay inside a document; otherwise windows cross documents."""
    cache: FilePath | None = None
    """Where copies of remote data are kept; None: in the user's cache folder."""

    @property
    def sources(self) -> list[SourceSection]:
        """What is mixed; a single source is a mixture of one."""
        if self.mixture is not None:
            return self.mixture
        return [SourceSection(path=self.path, format=self.format, held_out=self.held_out, eos_id=self.eos_id)]

    def problem(self) -> str | None:
        """What contradicts itself: the setting's dotted name, and why."""
        if not self.path and self.mixture is None:
            return "data.path: missing; name the data there, or several sources in data.mixture"
        if self.mixture is not None:
            for name in ("path", "held_out", "eos_id"):
                if getattr(self, name) not in {None, ""}:
                    return f"data.{name}: stands beside data.mixture; set it in each source of the mixture instead"
            if self.format != "entasis":
                return "data.format: stands beside data.mixture; set it in each source of the mixture instead"
        problems = (
            self._problem_of(source, "data" if self.mixture is None else f"data.mixture.{number}")
            for number, source in enumerate(self.sources)
        )
        return next((problem for problem in problems if problem), None)

    def _problem_of(self, source: SourceSection, where: str) -> str | None:
        if source.format == "entasis":
            given = [name for name in ("held_out", "eos_id") if getattr(source, name) is not None]
            if given:
                return f"{where}.{given[0]}: a prepared folder says so itself; remove it, or set {where}.format"
        elif self.vocab_size is None:
            return (
                f"data.vocab_size: missing; {source.format} files do not say how many ids there are (GPT-2's tokenizer "
                "has 50257)"
            )
        elif source.eos_id is not None and source.eos_id >= self.vocab_size:
            return f"{where}.eos_id: {source.eos_id} is outside the vocabulary of {self.vocab_size}"
        elif self.document_mask and source.format != "megatron" and source.eos_id is None:
            return (
                f"data.document_mask: {source.format} files do not say where documents end; set {where}.eos_id to the "
                "id between them (50256 with GPT-2's tokenizer), or data.document_mask to false"
            )
        return None


class ModelSection(Section):
    """The block (`ModelConfig` without the vocabulary, which comes from the data). None: as the style says."""

    style: Style = "llama"
    context: Count = 256
    norm: Norm | None = None
    positions: Positions | None = None
    activation: Activation | None = None
    bias: bool | None = None
    tied: bool | None = None
    norm_epsilon: Rate = 1e-5
    rotary_theta: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 10_000.0
    rotary_scaling: dict[str, Any] | None = None
    """`RotaryScaling` as plain data. None: positions as they are."""
    resize: Resize = "carry"
    attention_scale: AttentionScale = "sqrt"
    embedding_multiplier: Rate = 1.0
    residual_multiplier: Rate = 1.0
    logit_divisor: Rate = 1.0
    initialisation: Initialisation = "scaled"
    causal: bool = True
    """False: an encoder, trained to predict tokens that are hidden from it (`train.mask_share`)."""

    @field_validator("rotary_scaling")
    @classmethod
    def _scaling_is_whole(cls, scaling: dict[str, Any] | None, others: ValidationInfo) -> dict[str, Any] | None:
        if scaling is None or not {"style", "positions", "rotary_theta"} <= others.data.keys():
            return scaling  # what is missing has an error of its own
        block = {name: others.data[name] for name in ("style", "positions", "rotary_theta")}
        try:
            ModelConfig.from_dict({"vocab_size": 1, "context": 1, **block, "rotary_scaling": scaling})
            return RotaryScaling.from_dict(scaling).to_dict()
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("rotary_scaling: ")) from None


class TrainSection(Section):
    """How long, on what, how often."""

    steps: Count
    batch_tokens: Count = 8192
    """Tokens of one optimizer step, over all ranks."""
    micro_batch: Count = 16
    """Sequences of one forward and backward pass on one rank."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto: bf16 where the device computes in it."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """What the backward pass needs of a block and is computed again instead of kept: nothing, everything, or all but
    the outputs of matrix products and attention. Changes memory and time, not numbers."""
    compile: bool = False
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """CPU threads; part of what bit equality is promised for."""
    seed: Seed = 0
    """Of initialisation, data order and, for an encoder, what is hidden."""
    mask_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Encoders only: share of each window's tokens that is hidden and to be predicted; None: 0.3."""
    router_loss: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    """Weight of the routers' auxiliary loss in what is trained; of no effect without experts."""
    evaluate_every: Count = 50
    evaluate_tokens: Count = 65_536
    checkpoint_every: Count = 50
    keep_checkpoints: Count = 3
    skip_bad_steps: Annotated[int, Field(ge=0, le=2**40)] = 0
    """How many steps of a run whose loss or gradient is not finite are left out; the next one ends it."""


class ParallelSection(Section):
    """How several processes train one model. Of no effect with one."""

    strategy: Literal["auto", "ddp", "fsdp", "hybrid"] = "auto"
    """ddp (auto): each rank holds the whole model. fsdp: parameters, gradients and optimizer state are cut among all
    ranks. hybrid: among groups of `shards` ranks; the groups hold the same."""
    shards: Count | None = None
    """hybrid only: ranks of a group, as the GPUs of one machine."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """In which ranks add up their gradients."""
    timeout_seconds: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = 600.0
    """How long ranks wait for one that does not answer."""

    @model_validator(mode="after")
    def _shards_are_of_hybrid(self) -> ParallelSection:
        if (self.strategy == "hybrid") != (self.shards is not None):
            raise ValueError(
                "shards: hybrid needs a number of them"
                if self.shards is None
                else f"shards {self.shards}: belongs to strategy hybrid, and this is {self.strategy}"
            )
        return self


class OptimizerSection(Section):
    """AdamW for all, or Muon for the blocks' matrices and AdamW for the rest."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: Rate = 3e-3
    block_rate: Rate = 1.0
    """Rate of the blocks' matrices / `learning_rate`. The published ><former recipe (muP) has 1/8."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    epsilon: Annotated[float, Field(ge=1e-16, allow_inf_nan=False)] = 1e-8
    clip: Rate | None = 1.0
    """Largest global norm of the gradient; null: no clipping."""


class ScheduleSection(Section):
    """The learning rate over time, as a share of `optimizer.learning_rate`."""

    name: Literal["cosine", "constant", "wsd", "power"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0, le=2**40)] = 20
    decay_steps: Annotated[int, Field(ge=0, le=2**40)] | None = None
    """wsd only: steps of the final decay; null: a fifth of the run."""
    final_ratio: Share = 0.1
    """Share of the rate at the end of cosine and wsd."""
    power_scale: Rate = 4.0
    """power only: a / sequences of a step in the rate min(learning_rate, a tokens^exponent)."""
    power_exponent: Annotated[float, Field(lt=0, allow_inf_nan=False)] = -0.566
    """power only."""

    @model_validator(mode="after")
    def _settings_are_of_the_schedule(self) -> ScheduleSection:
        for setting, schedules in _SCHEDULES_OF.items():
            value, default = getattr(self, setting), type(self).model_fields[setting].default
            if value != default and self.name not in schedules:
                raise ValueError(
                    f"{setting} {value} is a setting of {' and '.join(schedules)}, and the schedule is {self.name}; "
                    f"change one, or set it to {'null' if default is None else default}"
                )
        return self


_SCHEDULES_OF = {
    "decay_steps": ("wsd",),
    "final_ratio": ("cosine", "wsd"),
    "power_scale": ("power",),
    "power_exponent": ("power",),
}
"""Settings that only some schedules have."""


class WandbSection(Section):
    """Where Weights & Biases puts a run."""

    project: Annotated[str, Field(min_length=1, max_length=128)]
    mode: Literal["online", "offline"] = "online"
    """offline: kept in `wandb/` of the run folder, for `wandb sync`."""

    @field_validator("project")
    @classmethod
    def _project_is_text(cls, project: str) -> str:
        if not is_text(project):
            raise ValueError("not text that can be written as UTF-8")
        return project


class TrackSection(Section):
    """Mirrors of `metrics.jsonl`; none of them can stop a run."""

    tensorboard: bool = False
    wandb: WandbSection | None = None
