"""Every stored weight acts: each gets a gradient, and what could never get one is not stored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from entasis.model.transformer import Transformer
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape

Models = st.SearchStrategy[tuple[Shape, ModelConfig]]


def with_gradients(shape: Shape, config: ModelConfig) -> Transformer:
    model = Transformer(shape, config).double()
    tokens = torch.randint(config.vocab_size, (4, config.context), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, dims=1)
    loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    torch.autograd.backward(loss)
    return model


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_stored_weight_gets_a_gradient(data: st.DataObject, random_models: Models) -> None:
    for name, parameter in with_gradients(*data.draw(random_models)).named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.count_nonzero() > 0, name


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_column_of_the_query_key_value_weights_gets_a_gradient(
    data: st.DataObject, random_models: Models
) -> None:
    shape, config = data.draw(random_models)
    assume(all(layer.has_attention or layer.has_mlp for layer in shape.layers))  # others write nothing
    for _, block in with_gradients(shape, config).blocks():
        if block.attention is not None:
            gradient = block.attention.qkv.weight.grad
            assert gradient is not None
            assert (gradient.abs().amax(dim=0) > 0).all()


@pytest.mark.parametrize(("norm", "reads"), [("rmsnorm", [16, 40, 32, 40]), ("layernorm", [40, 48, 32, 40])])
def test_what_is_trimmed_would_only_have_read_zeros(norm: str, reads: list[int]) -> None:
    layers = tuple(LayerShape(width=w, heads=2, kv_heads=2, head_dim=8, mlp_hidden=16) for w in (40, 48, 32, 40))
    config = ModelConfig.from_dict({"vocab_size": 97, "context": 8, "norm": norm})
    model = Transformer(Shape(layers, embed_width=16), config)
    attentions = [block.attention for _, block in model.blocks()]
    assert [attention.qkv.in_width for attention in attentions if attention is not None] == reads
    assert [attention.norm.weight.numel() for attention in attentions if attention is not None] == [40, 48, 32, 40]
