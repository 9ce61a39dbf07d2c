"""Random valid models, for equalities that must hold for every shape."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape

RandomModels = st.SearchStrategy[tuple[Shape, ModelConfig]]

CONTEXT = 7
VOCAB = 23


@pytest.fixture(scope="session")
def random_models() -> RandomModels:
    """Shapes whose widths move freely, embedding and head above and below them; blocks of any mixture of parts."""
    return _models()


@st.composite
def _models(draw: st.DrawFn) -> tuple[Shape, ModelConfig]:
    def part(*choices: object) -> object:
        return draw(st.sampled_from([None, *choices]))

    parts = {
        "norm": part("layernorm", "rmsnorm"),
        "positions": part("learned", "rotary"),
        "activation": part("gelu", "swiglu"),
        "bias": part(True, False),
        "tied": part(True, False),
    }
    config = ModelConfig.from_dict(
        {"vocab_size": VOCAB, "context": CONTEXT, "style": draw(st.sampled_from(["gpt2", "llama"])), **parts}
    )
    layers = draw(st.lists(_layers(config), min_size=1, max_size=6))
    width = st.integers(4, 40)
    return Shape(tuple(layers), draw(width), None if config.tied else draw(st.none() | width)), config


@st.composite
def _layers(draw: st.DrawFn, config: ModelConfig) -> LayerShape:
    kv_heads = draw(st.integers(0, 3))
    head_dim = draw(st.integers(1, 6))
    return LayerShape(
        width=draw(st.integers(4, 32)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=2 * head_dim if config.positions == "rotary" else head_dim,
        mlp_hidden=draw(st.just(0) | st.integers(1, 40)),
        value_dim=draw(st.none() | st.integers(1, 9)),
    )
