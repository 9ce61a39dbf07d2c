"""What `budget` counts is what a model stores and what torch executes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from entasis.model.transformer import Transformer
from entasis.shape.budget import budget
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape

Models = st.SearchStrategy[tuple[Shape, ModelConfig]]


def executed_flops(model: Transformer, batch: int, time: int) -> int:
    tokens = torch.randint(model.config.vocab_size, (batch, time))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens)
    return int(counter.get_total_flops())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_counted_parameters_and_flops_of_any_shape(data: st.DataObject, random_models: Models) -> None:
    shape, config = data.draw(random_models)
    model = Transformer(shape, config)
    counted = budget(shape, config)
    assert counted.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert counted.flops_per_token * 2 * config.context == executed_flops(model, batch=2, time=config.context)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_counted_parameters_on_the_meta_device(data: st.DataObject, random_models: Models) -> None:
    shape, config = data.draw(random_models)
    with torch.device("meta"):
        model = Transformer(shape, config)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert budget(shape, config).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_flops_are_those_of_the_context_that_was_asked_for() -> None:
    layer = LayerShape(width=32, heads=4, kv_heads=2, head_dim=8, mlp_hidden=64)
    shape = Shape((layer, layer), embed_width=32)
    config = ModelConfig(vocab_size=97, context=16)
    model = Transformer(shape, config)
    assert executed_flops(model, batch=1, time=11) == 11 * budget(shape, config, context=11).flops_per_token
    assert executed_flops(model, batch=1, time=11) != 11 * budget(shape, config, context=16).flops_per_token


def test_a_large_model_is_counted_without_being_made() -> None:
    layers = tuple(
        LayerShape(width=w, heads=32, kv_heads=8, head_dim=128, mlp_hidden=4 * w) for w in (8192, 4096, 8192)
    )
    shape, config = Shape(layers, embed_width=6144), ModelConfig(vocab_size=128_256, context=8192)
    with torch.device("meta"):
        model = Transformer(shape, config)
    assert budget(shape, config).parameters == sum(parameter.numel() for parameter in model.parameters()) > 2e9
