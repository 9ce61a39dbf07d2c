"""What a block is made of: the ready sets, each part by itself, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from entasis.errors import ConfigError
from entasis.shape.model_config import ModelConfig


def test_llama_is_the_default_set() -> None:
    config = ModelConfig(vocab_size=97, context=16)
    assert config == ModelConfig(97, 16, "llama")
    assert (config.norm, config.positions, config.activation) == ("rmsnorm", "rotary", "swiglu")
    assert (config.bias, config.tied) == (False, False)
    assert config.mlp_input_matrices == 2
    assert not config.norm_has_bias


def test_the_gpt2_set() -> None:
    config = ModelConfig(97, 16, "gpt2")
    assert (config.norm, config.positions, config.activation) == ("layernorm", "learned", "gelu")
    assert (config.bias, config.tied) == (True, True)
    assert config.mlp_input_matrices == 1
    assert config.norm_has_bias


@pytest.mark.parametrize(
    ("part", "value"),
    [("norm", "rmsnorm"), ("positions", "rotary"), ("activation", "swiglu"), ("bias", False), ("tied", False)],
)
def test_each_part_of_a_set_can_be_set_by_itself(part: str, value: object) -> None:
    changed = ModelConfig(97, 16, "gpt2", **{part: value}).to_dict()  # type: ignore[arg-type]
    assert changed == ModelConfig(97, 16, "gpt2").to_dict() | {part: value}


def test_only_a_layer_norm_has_a_bias() -> None:
    assert not ModelConfig(97, 16, "llama", bias=True).norm_has_bias
    assert not ModelConfig(97, 16, "gpt2", bias=False).norm_has_bias


@pytest.mark.parametrize("config", [ModelConfig(97, 16), ModelConfig(97, 16, "gpt2", tied=False, norm_epsilon=1e-6)])
def test_plain_data_and_back_loses_nothing(config: ModelConfig) -> None:
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert [name for name, value in config.to_dict().items() if value is None] == ["rotary_scaling"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("style", "gpt3"), ("style", None), ("style", []), ("norm", "batchnorm"), ("positions", 3),
        ("activation", "relu"), ("bias", 1), ("bias", "yes"), ("tied", 0),
        ("vocab_size", 0), ("vocab_size", 97.0), ("vocab_size", True), ("vocab_size", "97"), ("context", -1),
        ("context", None), ("norm_epsilon", 0), ("norm_epsilon", float("nan")), ("norm_epsilon", "small"),
        ("rotary_theta", -1.0), ("rotary_theta", float("inf")), ("rotary_theta", True),
    ],
)  # fmt: skip
def test_a_wrong_value_names_the_field(field: str, value: object) -> None:
    data: dict[str, Any] = {"vocab_size": 97, "context": 16, field: value}
    with pytest.raises(ConfigError, match=rf"^{field}: expected "):
        ModelConfig.from_dict(data)


def test_unknown_and_missing_fields_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^hidden_size: unknown field"):
        ModelConfig.from_dict({"vocab_size": 97, "context": 16, "hidden_size": 3})
    with pytest.raises(ConfigError, match=r"^context: missing"):
        ModelConfig.from_dict({"vocab_size": 97})
    with pytest.raises(ConfigError, match=r"^vocab_size: missing"):
        ModelConfig.from_dict({})
    with pytest.raises(ConfigError, match=r"^model: expected an object"):
        ModelConfig.from_dict([1])  # type: ignore[arg-type]
