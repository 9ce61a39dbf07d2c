"""Rotary scaling as plain data: published values filled in, what does not belong refused in one line."""

from __future__ import annotations

import math
from typing import Any

import pytest

from entasis.errors import ConfigError
from entasis.run.sections import ModelSection
from entasis.shape.model_config import ModelConfig
from entasis.shape.rotary_scaling import RotaryScaling

YARN: dict[str, Any] = {"kind": "yarn", "factor": 4.0, "original_context": 4096}
LLAMA3: dict[str, Any] = {"kind": "llama3", "factor": 8.0, "original_context": 8192}


@pytest.mark.parametrize(
    ("given", "more"),
    [
        ({"kind": "linear", "factor": 2.0}, {}),
        ({"kind": "ntk", "factor": 1}, {}),
        (YARN, {"beta_fast": 32.0, "beta_slow": 1.0, "temperature": 0.1 * math.log(4) + 1}),
        ({**YARN, "temperature": 1.0, "beta_slow": 2}, {"beta_fast": 32.0}),
        (LLAMA3, {"low_frequency": 1.0, "high_frequency": 4.0}),
    ],
)
def test_published_values_are_filled_in(given: dict[str, Any], more: dict[str, Any]) -> None:
    scaling = RotaryScaling.from_dict(given)
    assert scaling.to_dict() == {**given, **more}
    assert RotaryScaling.from_dict(scaling.to_dict()) == scaling
    config = ModelConfig.from_dict({"vocab_size": 5, "context": 8, "rotary_scaling": given})
    assert config.rotary_scaling == scaling
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert hash(config)
    assert ModelSection(rotary_scaling=given).rotary_scaling == scaling.to_dict()


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"kind": "dynamic", "factor": 2}, "kind: expected one of linear, ntk, yarn, llama3"),
        ({"kind": "linear"}, "factor: missing"),
        ({"kind": "linear", "factor": 0.5}, "factor: expected a number from 1, got 0.5"),
        ({"kind": "linear", "factor": math.inf}, "factor: expected a number from 1"),
        ({"kind": "linear", "factor": math.nan}, "factor: expected a number from 1"),
        ({"kind": "linear", "factor": "2"}, "factor: expected a number from 1, got '2'"),
        ({"kind": "linear", "factor": True}, "factor: expected a number from 1, got True"),
        ({"kind": "linear", "factor": 2, "original_context": 8}, "original_context: linear has no such field"),
        ({**YARN, "low_frequency": 1.0}, "low_frequency: yarn has no such field; it has factor, original_context"),
        ({"kind": "yarn", "factor": 2}, "original_context: missing; yarn needs"),
        ({**LLAMA3, "original_context": 0}, "original_context: expected a whole number from 1"),
        ({**LLAMA3, "original_context": 2.5}, "original_context: expected a whole number from 1"),
        ({**YARN, "beta_slow": 40}, "beta_slow: expected below beta_fast 32.0, got 40"),
        ({**LLAMA3, "high_frequency": 1.0}, "low_frequency: expected below high_frequency 1.0, got 1.0"),
        ({**YARN, "temperature": 0}, "temperature: expected a number above 0, got 0"),
        ({**YARN, "temprature": 1}, r"'temprature': unknown field \(did you mean 'temperature'\?\)"),
    ],
)
def test_what_does_not_fit_is_one_line(data: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}") as error:
        RotaryScaling.from_dict(data)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=f"^rotary_scaling: {line}"):
        ModelConfig.from_dict({"vocab_size": 5, "context": 8, "rotary_scaling": data})
    with pytest.raises(ValueError, match=line):
        ModelSection(rotary_scaling=data)


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ({"style": "gpt2"}, "positions are learned, not rotary"),
        ({"positions": "learned"}, "positions are learned, not rotary"),
        ({"rotary_theta": 1.0}, "yarn needs a rotary_theta above 1"),
    ],
)
def test_what_the_block_does_not_allow(parts: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^rotary_scaling: {line}"):
        ModelConfig(vocab_size=5, context=8, rotary_scaling=RotaryScaling(**YARN), **parts)
    with pytest.raises(ValueError, match=line):
        ModelSection(rotary_scaling=YARN, **parts)
