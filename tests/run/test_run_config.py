"""The configuration: whole before any data is opened, and the same when it is read back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from entasis.errors import ConfigError
from entasis.run.config import RunConfig, load_config, parse_config
from entasis.settings import parse_yaml

MakeConfig = Callable[..., RunConfig]

_MINIMAL: dict[str, Any] = {
    "data": {"path": "data"},
    "shape": {"family": "uniform", "layers": 2, "width": 32, "heads": 4},
    "train": {"steps": 5},
    "out": "runs/x",
}


def _written(path: Path, data: Any) -> Path:
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return path


def _round_trip(config: RunConfig, path: Path) -> RunConfig:
    path.write_text(config.to_yaml(), encoding="utf-8")
    return load_config(path)


def test_defaults_are_those_of_the_guide(tmp_path: Path) -> None:
    config = load_config(_written(tmp_path / "c.yaml", _MINIMAL))
    assert (config.model.style, config.model.context) == ("llama", 256)
    assert (config.train.batch_tokens, config.train.micro_batch, config.train.seed) == (8192, 16, 0)
    assert (config.optimizer.learning_rate, config.optimizer.betas, config.optimizer.clip) == (3e-3, [0.9, 0.95], 1.0)
    assert (config.schedule.name, config.schedule.warmup_steps, config.schedule.final_ratio) == ("cosine", 20, 0.1)
    assert config.data.document_mask is False
    assert config.batch_sequences == 32


def test_the_resolved_configuration_reads_back_equal(tmp_path: Path, make_config: MakeConfig) -> None:
    for config in (
        load_config(_written(tmp_path / "c.yaml", _MINIMAL)),
        make_config(),
        make_config({"model.causal": False}),
        make_config({"model.causal": False, "train.mask_share": 0.15}),
        make_config({"optimizer.clip": None, "train.threads": "auto", "schedule": {"name": "wsd", "decay_steps": 3}}),
        parse_config(
            {
                **_MINIMAL,
                "compare": {
                    "shapes": {"a": {"family": "uniform"}, "b.c-d": {"family": "prism", "heads": [1, 4]}},
                    "seeds": [3, 2**63 - 1],
                    "tune": {"learning_rate": [1e-5, 3e-3], "seed": 9},
                    "prompt": "Ünïcode: 'quotes' # and\n\tlines",
                },
            }
        ),
    ):
        assert _round_trip(config, tmp_path / "resolved.yaml") == config
        assert "!" not in config.to_yaml().replace("Ünïcode", ""), "no tags: any YAML reader can read it"


@pytest.mark.parametrize("text", ["1e5", "3e-3", "1_0e4", "1.5", "7", "0x10", "true", "no", "null", "~", "2026-01-31"])
def test_a_text_that_looks_like_something_else_stays_a_text(text: str, tmp_path: Path) -> None:
    """A folder may be called 1e5, and a shape too."""
    shapes = {text: {"family": "uniform"}} if text[0].isalnum() else {}
    config = parse_config(
        {**_MINIMAL, "out": text, "data": {"path": text}, "compare": {"shapes": {"x": {}, **shapes}, "prompt": text}}
    )
    assert _round_trip(config, tmp_path / "c.yaml") == config


@settings(max_examples=100)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30))
def test_any_text_reads_back(text: str) -> None:
    config = parse_config({**_MINIMAL, "out": text, "compare": {"shapes": {"x": {}}, "prompt": text}})
    read = parse_yaml(config.to_yaml(), "the configuration")
    assert (read["out"], read["compare"]["prompt"]) == (text, text)


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_any_rate_reads_back_exactly(rate: float) -> None:
    config = parse_config({**_MINIMAL, "optimizer": {"learning_rate": rate}})
    assert parse_yaml(config.to_yaml(), "the configuration")["optimizer"]["learning_rate"] == rate


@pytest.mark.parametrize("written", ["3e-3", "3.0e-3", "0.003", "3.e-3", "+3e-3", ".003", "30E-4"])
def test_numbers_as_people_write_them(written: str, tmp_path: Path) -> None:
    path = _written(tmp_path / "c.yaml", _MINIMAL)
    assert load_config(path, [f"optimizer.learning_rate={written}"]).optimizer.learning_rate == 3e-3


def test_settings_of_the_command_line_stand_over_the_file(tmp_path: Path) -> None:
    path = _written(tmp_path / "c.yaml", {**_MINIMAL, "optimizer": None})
    config = load_config(
        path,
        [
            "train.steps=100",
            "train.steps=7",
            "optimizer.betas=[0.8, 0.9]",
            "optimizer.clip=null",
            "shape={family: uniform, layers: 3, width: 32, heads: 4}",
            "shape.layers=4",
            "out=a=b",
            "compare.shapes.a.family=uniform",
            "model.style=gpt2",
        ],
    )
    assert config.train.steps == 7
    assert (config.optimizer.betas, config.optimizer.clip) == ([0.8, 0.9], None)
    assert config.shape["layers"] == 4
    assert config.out == "a=b"
    assert config.compare is not None
    assert config.compare.shapes == {"a": {"family": "uniform"}}
    assert config.block(300).tied is True


def test_the_objective_follows_the_model(make_config: MakeConfig) -> None:
    assert make_config().mask_share is None
    assert make_config({"model.causal": False}).mask_share == 0.3
    assert make_config({"model.causal": False, "train.mask_share": 0.15}).mask_share == 0.15
    assert make_config().block(257).vocab_size == 257
    assert make_config({"model.causal": False}).block(257).vocab_size == 258


def test_a_configuration_cannot_be_changed() -> None:
    config = parse_config(_MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.out = "elsewhere"


def test_parsing_leaves_what_it_was_given_alone() -> None:
    data = {**copy.deepcopy(_MINIMAL), "compare": {"shapes": {"a": {"family": "prism", "heads": [1, 4]}}}}
    before = copy.deepcopy(data)
    parse_config(data).for_shape("a").design(64)
    assert data == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"schedule": {"name": "cosine", "power_scale": 3.0}},
            r"^schedule: power_scale 3\.0 is a setting of power, and",
        ),
        (
            {"schedule": {"name": "constant", "final_ratio": 0.5}},
            r"^schedule: final_ratio 0\.5 is a setting of cosine and",
        ),
        ({"schedule": {"decay_steps": 5}}, r"^schedule: decay_steps 5 is a setting of wsd, .* or set it to null"),
        ({"model": {"positions": "learned", "rotary_theta": 5.0}}, r"rotary_theta: positions are learned, not rotary"),
        ({"train": {"steps": 2, "threads": 0}}, r"^train\.threads: expected .*greater than or equal to 1; got 0"),
        ({"train": 3}, r"^train: expected settings as `name: value`; got 3"),
        ({"optimizer": {"betas": [0.9]}}, r"^optimizer\.betas: list should have at least 2 items, not 1"),
    ],
)
def test_what_cannot_act_or_cannot_be_is_told(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**_MINIMAL, **settings})


_EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_hidden": 16}


def test_a_weight_of_router_losses_needs_experts(tmp_path: Path) -> None:
    def load(weight: float, shape: dict[str, Any], compared: dict[str, Any] | None = None) -> RunConfig:
        data = {**_MINIMAL, "shape": {**_MINIMAL["shape"], **shape}, "train": {"steps": 5, "router_loss": weight}}
        return load_config(
            _written(tmp_path / "c.yaml", data | ({"compare": {"shapes": compared}} if compared else {}))
        )

    for dense in (None, {"a": {}, "b": {"width": 48}}):
        with pytest.raises(ConfigError, match=r"^train\.router_loss 0\.5: no layer has experts"):
            load(0.5, {}, dense)
        assert load(0.01, {}, dense).train.router_loss == 0.01, "as every saved configuration has it"
    assert load(0.5, _EXPERTS).train.router_loss == 0.5
    mixed = load(0.5, {}, {"dense": {}, "mixture": _EXPERTS})
    alone = mixed.for_shape("dense")
    assert parse_config(parse_yaml(alone.to_yaml(), "saved")) == alone, "its run reads its own configuration back"


# --- compared shapes --------------------------------------------------------------------------------------------------


def _compared(shape: dict[str, Any], **base: Any) -> RunConfig:
    data = {**_MINIMAL, "shape": {**_MINIMAL["shape"], **base}, "compare": {"shapes": {"it": shape}}}
    return parse_config(data)


def test_a_compared_shape_is_merged_over_the_shape() -> None:
    config = _compared({"width": 48})
    assert config.for_shape("it").shape == {"family": "uniform", "layers": 2, "width": 48, "heads": 4}
    assert config.for_shape("it").compare is None
    assert config.for_shape("it").design(64).shape.layers[0].width == 48


def test_inherited_settings_that_a_family_does_not_know_are_dropped() -> None:
    config = _compared(
        {"family": "uniform"}, family="bowtie", layers=4, bottleneck=0.5, turn=3, multiple=8, width=32, heads=4
    )
    assert config.for_shape("it").shape == {"family": "uniform", "layers": 4, "width": 32, "heads": 4}


def test_own_settings_that_a_family_does_not_know_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"^compare\.shapes\.it: bottleneck: family uniform has no such setting"):
        _compared({"family": "uniform", "bottleneck": 0.5})
    with pytest.raises(ConfigError, match=r"^compare\.shapes\.it: .*unknown family 'unifrom'"):
        _compared({"family": "unifrom"})


def test_errors_of_a_shape_come_before_any_data_is_opened() -> None:
    with pytest.raises(ConfigError, match=r"^shape: layer 1: "):
        parse_config({**_MINIMAL, "shape": {"family": "uniform", "layers": 2, "width": 30, "heads": 4}})
    with pytest.raises(ConfigError, match=r"^compare\.shapes\.it: layer 1: "):
        _compared({"heads": 5})


def test_a_compared_shape_has_settings_of_the_model_of_its_own() -> None:
    own = _compared({"model": {"resize": "zero"}}).for_shape("it")
    assert own.model.resize == "zero"
    assert "model" not in own.shape


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("zero", r"expected settings of the section `model`, got 'zero'"),
        ({"context": 8}, r"\.context: shapes can only be compared with one context"),
        ({"causal": False}, r"\.causal: shapes can only be compared with one causal"),
        ({"resise": "zero"}, r"\.resise: unknown setting \(did you mean 'resize'\?\)"),
        ({"resize": "zeros"}, r"\.resize: "),
        ({"rotary_theta": "high"}, r"\.rotary_theta: "),
    ],
)
def test_wrong_settings_of_the_model_are_told(model: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^compare\.shapes\.it\.model(: )?{message}"):
        _compared({"model": model})


@pytest.mark.parametrize(
    ("contrast", "message"),
    [
        ({"of": ["it"], "against": ["its"]}, r"its is not among shapes \(did you mean 'it'\?\)"),
        ({"of": ["it"], "against": ["it"]}, r"it stands there twice"),
        ({"of": [], "against": ["it"]}, r"of: "),
        ({"of": ["it"]}, r"against: "),
        ({"off": ["it"], "against": ["it"]}, r"off: unknown setting \(did you mean 'of'\?\); known here: of, against"),
    ],
)
def test_wrong_contrasts_are_told(contrast: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^compare(: |\.)contrasts\.c(: |\.){message}"):
        parse_config({**_MINIMAL, "compare": {"shapes": {"it": {}}, "contrasts": {"c": contrast}}})
