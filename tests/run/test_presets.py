"""The presets that come with the package: every one is whole, and the published figures hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from entasis.errors import ConfigError
from entasis.model.transformer import Transformer
from entasis.run.config import load_config
from entasis.run.presets import preset_names, preset_summary, read_inherited
from entasis.shape.budget import budget
from entasis.train.schedule import learning_rate


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_builds_on_the_meta_device_as_counted(name: str) -> None:
    config = load_config(name)
    assert config.data.vocab_size is not None
    assert preset_summary(name).endswith(".")
    assert config.out == f"runs/{name}"
    block, shape = config.block(config.data.vocab_size), config.design(config.data.vocab_size).shape
    with torch.device("meta"):
        model = Transformer(shape, block)
    assert model.parameter_count == budget(shape, block).parameters


@pytest.mark.parametrize(("name", "millions"), [("prism-124m", 123.5), ("prism-354m", 353.5), ("prism-757m", 756.7)])
def test_prism_presets_have_the_quoted_parameters(name: str, millions: float) -> None:
    for preset in (name, f"{name}-uniform"):
        config = load_config(preset)
        cost = budget(config.design(50_257).shape, config.block(50_257))
        assert round(cost.effective_parameters / 1e6, 1) == millions


@pytest.mark.parametrize(
    ("name", "tokens_billion", "peak", "final"),
    [
        ("bowtie-200m", 10.00, 4.68e-3, 1.12e-3),
        ("bowtie-500m", 25.00, 5.57e-3, 1.33e-3),
        ("bowtie-1b", 50.00, 7.53e-3, 1.80e-3),
        ("bowtie-2b", 104.86, 9.90e-3, 2.37e-3),
        ("bowtie-moe-3b", 104.86, 9.90e-3, 2.37e-3),
    ],
)
def test_bowtie_presets_follow_the_published_recipe(
    name: str, tokens_billion: float, peak: float, final: float
) -> None:
    config, baseline = load_config(name), load_config(f"{name}-uniform")
    shape = config.design(100_263).shape
    assert round(config.train.steps * config.train.batch_tokens / 1e9, 2) == tokens_billion
    assert learning_rate(config, config.schedule.warmup_steps) == pytest.approx(peak, rel=2e-3)
    assert learning_rate(config, config.train.steps - 1) == pytest.approx(final, rel=4e-3)
    assert config.schedule.warmup_steps == round(0.08 * config.train.steps)
    assert min(layer.width for layer in shape.layers) == round(0.3 * shape.embed_width)
    assert shape.layers[0].width == shape.layers[-1].width
    mine, theirs = (budget(each.design(100_263).shape, each.block(100_263)) for each in (config, baseline))
    ratio = mine.ratio_to(theirs)
    # Published, parameter-matched: about 3 % fewer FLOPs and about 10 % less KV cache.
    assert ratio["effective_parameters"] == pytest.approx(1, abs=0.006)
    assert ratio["effective_flops_per_token"] == pytest.approx(0.965, abs=0.015)
    assert ratio["kv_cache_bytes_per_token"] == pytest.approx(0.895, abs=0.01)


def test_a_file_inherits_from_a_preset_and_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("inherits: prism-124m\ntrain: {steps: 7}\nout: here\n", encoding="utf-8")
    (tmp_path / "yours.yaml").write_text("inherits: mine.yaml\noptimizer: {learning_rate: 1e-3}\n", encoding="utf-8")
    config = load_config(tmp_path / "yours.yaml", ["train.seed=3"])
    assert (config.train.steps, config.train.seed, config.optimizer.learning_rate, config.out) == (7, 3, 1e-3, "here")
    assert config.shape["heads"] == [3, 3, 3, 6, 6, 6, 12, 12, 12, 12, 12, 12]
    assert config.train.batch_tokens == 524_288


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("inherits: circle.yaml", r"goes in a circle"),
        ("inherits: prism-124", r"no such file or preset \(did you mean 'prism-124m'\?\)"),
        ("inherits: [a]", r"expected the name of a preset or a file"),
        ("inherits: missing.yaml", r"missing.yaml"),
    ],
)
def test_a_wrong_ground_is_one_line(text: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "circle.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=line) as error:
        read_inherited(tmp_path / "circle.yaml")
    assert "\n" not in str(error.value)
