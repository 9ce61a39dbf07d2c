"""The smallest preset of each paper takes one real optimizer step on the CPU."""

from __future__ import annotations

import resource

import pytest
import torch

from entasis.model.loss import summed_cross_entropy
from entasis.model.transformer import Transformer
from entasis.run.config import load_config
from entasis.train.optimizer import Optimizer
from entasis.train.schedule import learning_rate

_TOKENS = 64


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prism-124m", "bowtie-200m"])
def test_one_step_in_bfloat16_within_24_gigabytes(name: str) -> None:
    config = load_config(name)
    assert config.data.vocab_size is not None
    model = Transformer(config.design(config.data.vocab_size).shape, config.block(config.data.vocab_size), seed=42)
    optimizer = Optimizer(model, config.optimizer)
    tokens = torch.randint(0, config.data.vocab_size, (1, _TOKENS + 1), generator=torch.Generator().manual_seed(0))

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.hidden(tokens[:, :-1]).flatten(0, 1)
            return summed_cross_entropy(hidden, model.head_weight, tokens[:, 1:].flatten()) / _TOKENS

    before = loss()
    before.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step(learning_rate(config, config.schedule.warmup_steps))
    with torch.no_grad():
        assert loss() < before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 24 * 2**20  # KiB
