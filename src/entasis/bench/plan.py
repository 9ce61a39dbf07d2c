"""What a configuration would cost elsewhere: tokens, FLOPs, memory and hours, predicted without training or data.

FLOPs are counted exactly. Memory is exact for weights, gradients and optimizer state, and an estimate for activations:
the tensors that the backward pass of one micro-batch needs, summed layer by layer. Hours follow from an assumed
utilisation of a named device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from entasis.errors import ConfigError
from entasis.run.config import RunConfig
from entasis.shape.budget import Budget, budget
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape
from entasis.train.peaks import peak_flops

_STATE_BYTES = {"adamw": 16, "muon": 12}
"""Per number: float32 weight and gradient, and the optimizer's moments (Muon has one where AdamW has two)."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The cost of one run."""

    name: str
    budget: Budget
    steps: int
    tokens: int
    tokens_per_parameter: float
    """Tokens per non-embedding parameter."""
    flops: float
    """Of the whole run, forward and backward (counted as three forward passes)."""
    state_bytes: int
    """Weights, gradients and optimizer state."""
    activation_bytes: int
    """Estimate for one micro-batch."""
    hours: float
    """On one device at the assumed utilisation."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The cost of a configuration: one run, or all runs of a comparison."""

    runs: tuple[RunPlan, ...]
    """One per shape."""
    repeats: int
    """How often each shape is trained: seeds, and rates that are tried."""
    device: str
    """The device and peak that the hours are for."""
    utilisation: float

    @property
    def hours(self) -> float:
        """Of everything, one run after the other on one device."""
        return self.repeats * sum(run.hours for run in self.runs)


def plan(config: RunConfig, device: str, utilisation: float) -> Plan:
    """Predicts the cost of `config` on one `device` (a name such as H100) at a model-FLOPs utilisation.

    Raises:
        ConfigError: the vocabulary is not known, the device is not in the table, or the utilisation is no share.
    """
    if config.data.vocab_size is None:
        raise ConfigError("data.vocab_size: missing; a plan is made before there is data, so say its vocabulary")
    if not 0 < utilisation <= 1:
        raise ConfigError(f"--mfu: expected a share above 0 and at most 1, got {utilisation}")
    dtype = torch.float32 if config.train.precision == "fp32" else torch.bfloat16
    peak = peak_flops(device, dtype)
    if peak is None:
        raise ConfigError(f"--on: no peak rate is known for {device!r}; name a device such as H100, H200, A100, L40S")
    section = config.compare
    names = list(section.shapes) if section else []
    configs = {name: config.for_shape(name) for name in names} or {str(config.shape["family"]): config}
    runs = [_run_plan(name, each, config.data.vocab_size, peak[0] * utilisation) for name, each in configs.items()]
    repeats = len(section.seeds) + (len(section.tune.learning_rate) if section.tune else 0) if section else 1
    return Plan(tuple(runs), repeats, peak[1], utilisation)


def _run_plan(name: str, config: RunConfig, vocab_size: int, flops_per_second: float) -> RunPlan:
    shape, block = config.design(vocab_size).shape, config.block(vocab_size)
    cost = budget(shape, block)
    tokens = config.train.steps * config.train.batch_tokens
    flops = 3.0 * cost.flops_per_token * tokens
    return RunPlan(
        name=name,
        budget=cost,
        steps=config.train.steps,
        tokens=tokens,
        tokens_per_parameter=tokens / (cost.parameters - cost.embedding_parameters),
        flops=flops,
        state_bytes=_STATE_BYTES[config.optimizer.name] * cost.parameters,
        activation_bytes=activation_bytes(
            shape, block, config.train.micro_batch * block.context, bf16=config.train.precision != "fp32"
        ),
        hours=flops / flops_per_second / 3600,
    )


def activation_bytes(shape: Shape, config: ModelConfig, tokens: int, *, bf16: bool) -> int:
    """Estimate of what the backward pass of `tokens` tokens keeps, with fused attention (no attention matrix).

    Per layer and token: the stream before each norm and the normalised state, queries, keys and values before and
    after rotation, attention's output, and the MLP's hidden units before and after the activation. The stream is
    float32, products are in the compute dtype.
    """
    product = 2 if bf16 else 4
    per_token = sum(_layer_activations(layer, config, product) for layer in shape.layers)
    per_token += 4 * shape.layers[-1].width + 2 * 4 * shape.head_width  # final norm, head input and its gradient
    return tokens * per_token


def _layer_activations(layer: LayerShape, config: ModelConfig, product: int) -> int:
    stream, total = 4 * layer.width, 0
    if layer.has_attention:
        rotated = (layer.heads + layer.kv_heads) * layer.head_dim * product if config.positions == "rotary" else 0
        values = layer.heads * layer.value_head_dim * product
        total += stream + layer.width * product + layer.qkv_width * product + rotated + values
    if layer.has_mlp:
        active = max(layer.experts_per_token, 1)
        hidden = layer.mlp_hidden * product * active
        total += stream + layer.width * product + (config.mlp_input_matrices + config.mlp_input_matrices) * hidden
    return total
