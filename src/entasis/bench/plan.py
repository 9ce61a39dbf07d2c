"""What a configuration would cost elsewhere: tokens, FLOPs, memory and hours, predicted without training or data.

FLOPs are counted exactly. Memory is exact for weights, gradients and optimizer state, and an estimate for activations:
the tensors that the backward pass of one micro-batch needs, summed layer by layer, as activation checkpointing leaves
them. Hours follow from an assumed utilisation of a named device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from entasis.errors import ConfigError
from entasis.model.window import LEAST_BLOCK
from entasis.run.config import RunConfig
from entasis.run.sections import ActivationCheckpointing
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
    """Of the whole run, forward and backward (counted as three forward passes). What activation checkpointing computes
    again is not in it."""
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
    again = _computed_again(shape, cost, vocab_size, config.train.activation_checkpointing)
    return RunPlan(
        name=name,
        budget=cost,
        steps=config.train.steps,
        tokens=tokens,
        tokens_per_parameter=tokens / (cost.parameters - cost.embedding_parameters),
        flops=flops,
        state_bytes=_STATE_BYTES[config.optimizer.name] * cost.parameters,
        activation_bytes=activation_bytes(
            shape,
            block,
            config.train.micro_batch * block.context,
            bf16=config.train.precision != "fp32",
            checkpointing=config.train.activation_checkpointing,
        ),
        hours=(flops + tokens * again) / flops_per_second / 3600,
    )


def activation_bytes(
    shape: Shape, config: ModelConfig, tokens: int, *, bf16: bool, checkpointing: ActivationCheckpointing = "none"
) -> int:
    """Estimate of what the backward pass of `tokens` tokens holds at its fullest, with fused attention (no attention
    matrix).

    Without checkpointing, per layer and token: the stream before each norm and the normalised state, queries, keys and
    values before and after rotation, attention's output, and the MLP's hidden units before and after the activation.
    The stream is float32, products are in the compute dtype. With it, what a layer keeps is its input (`block`) and the
    outputs of its products (`selective`); the rest is there for one layer at a time. The gradients of one layer's
    hidden units are added; those of weights are part of the state.
    """
    layers = [_LayerActivations(layer, config, 2 if bf16 else 4) for layer in shape.layers]
    kept = [layer.kept(checkpointing) for layer in layers]
    per_token = sum(kept) + max(
        layer.kept("none") - part + layer.gradients for layer, part in zip(layers, kept, strict=True)
    )
    per_token += 4 * shape.layers[-1].width + 2 * 4 * shape.head_width  # final norm, head input and its gradient
    return tokens * per_token


@dataclass(frozen=True, slots=True)
class _LayerActivations:
    """Bytes per token of one layer."""

    layer: LayerShape
    config: ModelConfig
    product: int
    """Of one number in the compute dtype."""

    def kept(self, checkpointing: ActivationCheckpointing) -> int:
        """What the layer keeps until its gradient is due."""
        stream = 4 * self.layer.width
        if checkpointing == "block":
            return stream
        if checkpointing == "selective":
            return stream + self._products
        return self._everything

    @property
    def gradients(self) -> int:
        """Of the hidden units, before and after the activation."""
        active = max(self.layer.experts_per_token, 1)
        return (self.config.mlp_input_matrices + 1) * self.layer.mlp_hidden * active * self.product

    @property
    def _products(self) -> int:
        """Outputs of matrix products and attention."""
        layer, numbers = self.layer, 0
        if layer.has_attention:
            numbers += layer.qkv_width + layer.heads * layer.value_head_dim + layer.width
        if layer.has_mlp:
            active = max(layer.experts_per_token, 1)
            numbers += active * (self.config.mlp_input_matrices * layer.mlp_hidden + layer.width)
        return numbers * self.product

    @property
    def _everything(self) -> int:
        layer, stream, numbers = self.layer, 0, 0
        if layer.has_attention:
            stream += 4 * layer.width
            numbers += layer.width + layer.qkv_width + layer.heads * layer.value_head_dim
            if self.config.positions == "rotary":
                numbers += (layer.heads + layer.kv_heads) * layer.head_dim
            numbers += self._window_copies
        if layer.has_mlp:
            stream += 4 * layer.width
            hidden = 2 * self.config.mlp_input_matrices * layer.mlp_hidden
            if layer.experts:  # each choice of a token is a row of its own, going in and coming out
                numbers += layer.experts_per_token * (hidden + 2 * layer.width) + layer.width
            else:
                numbers += hidden + layer.width
        return stream + numbers * self.product

    @property
    def _window_copies(self) -> int:
        """Inside a window the queries are filled up to whole blocks, and each block has its own copy of the keys and
        values that it meets: those of up to three blocks, as a block is at least half a window."""
        layer = self.layer
        if layer.window is None or layer.window >= self.config.context:
            return 0
        copies = 1 + (layer.window - 1) / max(LEAST_BLOCK, layer.window // 2)
        near = layer.kv_heads * (layer.head_dim + layer.value_head_dim)
        queries = layer.heads * (layer.head_dim + layer.value_head_dim)
        return round((queries + copies * near) * (1 - layer.window / self.config.context))


def _computed_again(shape: Shape, cost: Budget, vocab_size: int, checkpointing: ActivationCheckpointing) -> int:
    """FLOPs per token that activation checkpointing adds: under `block` a forward pass without the head's product.

    What `selective` computes again has no matrix products and is not counted.
    """
    if checkpointing != "block":
        return 0
    return cost.flops_per_token - 2 * shape.head_width * vocab_size
