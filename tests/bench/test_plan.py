"""Plans: exact where they can be, and the estimate of activations near what torch keeps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import entasis
from entasis.bench.plan import activation_bytes, plan
from entasis.errors import ConfigError
from entasis.model.loss import summed_cross_entropy
from entasis.model.transformer import Transformer
from entasis.run.config import load_config, parse_config
from entasis.settings import parse_yaml
from entasis.shape.model_config import ModelConfig


def test_a_plan_counts_the_whole_run() -> None:
    config = load_config("prism-124m")
    made = plan(config, "NVIDIA H100 80GB HBM3", 0.5)
    (run,) = made.runs
    assert made.repeats == 1
    assert run.tokens == config.train.steps * 524_288
    assert run.flops == 3 * run.budget.flops_per_token * run.tokens
    assert run.state_bytes == 16 * 124_439_808
    assert run.hours == pytest.approx(run.flops / (0.5 * 989.4e12) / 3600)
    assert made.hours == run.hours


def test_what_is_computed_again_costs_time_and_saves_memory() -> None:
    none, block, selective = (
        plan(load_config("prism-124m", [f"train.activation_checkpointing={how}"]), "H100", 0.5).runs[0]
        for how in ("none", "block", "selective")
    )
    assert block.activation_bytes < selective.activation_bytes < none.activation_bytes
    assert none.flops == block.flops == selective.flops
    assert selective.hours == none.hours
    head = 2 * 768 * 50_257
    assert block.hours / none.hours == pytest.approx((4 - head / none.budget.flops_per_token) / 3)


def test_the_long_context_of_the_documentation_is_what_it_says() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    example = re.search(r"## Contexts of 4k and more.*?```yaml\n(.*?)```\n(.*?)## ", text, re.DOTALL)
    assert example
    settings = parse_yaml(example[1], "documentation")
    said = {"block": "{} GiB of activations", "selective": "{} under `selective`", "none": "{} under\n`none`"}
    for how, words in said.items():
        settings["train"]["activation_checkpointing"] = how
        (run,) = plan(parse_config(settings), "H100", 0.4).runs
        assert words.format(f"{run.activation_bytes / 2**30:.2f}") in example[2]


@pytest.mark.parametrize(("name", "least", "most"), [("1h", 0.8, 1.1), ("6h", 4, 6), ("24h", 16, 24)])
def test_one_gpu_presets_fit_their_hours(name: str, least: float, most: float) -> None:
    config = load_config(f"one-gpu-{name}")
    made = plan(config, "H100", 0.35)
    assert config.compare is not None
    assert config.compare.tune is not None
    assert made.repeats == len(config.compare.seeds) + len(config.compare.tune.learning_rate)
    assert least < made.hours < most
    assert all(run.tokens_per_parameter >= 20 for run in made.runs)
    uniform, other = (run.budget.effective_parameters for run in made.runs)
    assert abs(other / uniform - 1) < config.compare.match.tolerance


@pytest.mark.parametrize(
    ("device", "share", "overrides", "line"),
    [
        ("TI-83", 0.4, [], "--on: no peak rate is known for 'TI-83'"),
        ("H100", 1.5, [], "--mfu: expected a share"),
        ("H100", 0.4, ["data.vocab_size=null"], "data.vocab_size: missing"),
    ],
)
def test_what_cannot_be_planned_is_one_line(device: str, share: float, overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        plan(load_config("prism-124m", overrides), device, share)


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("family", ["uniform", "bowtie"])
def test_the_estimate_of_activations_is_near_what_backward_keeps(style: Any, family: str) -> None:
    config = ModelConfig(vocab_size=64, context=64, style=style)
    settings: dict[str, Any] = {"multiple": 16} if family == "bowtie" else {}
    shape = entasis.family(family, layers=4, width=96, heads=4, config=config, **settings)
    model = Transformer(shape, config)
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.randint(0, 64, (4, 64))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.hidden(tokens)
        loss = summed_cross_entropy(hidden.flatten(0, 1), model.head_weight, tokens.flatten())
    assert loss.isfinite()
    estimate = activation_bytes(shape, config, tokens.numel(), bf16=False)
    assert estimate == pytest.approx(sum(kept.values()), rel=0.25)
