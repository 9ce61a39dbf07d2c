"""A mixture of experts against a plain loop over its experts: values, gradients, losses, costs, precision."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from entasis.model.grouped import grouped_linear, grouped_outer
from entasis.model.init import matrix_std
from entasis.model.moe import MoE, Routing, router_loss
from entasis.model.transformer import Transformer
from entasis.run.sections import OptimizerSection
from entasis.shape.budget import budget
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape
from entasis.train.optimizer import Optimizer

Style = Literal["gpt2", "llama"]
styles = pytest.mark.parametrize("style", ["gpt2", "llama"])
LAYER = LayerShape(width=32, heads=4, kv_heads=2, head_dim=8, mlp_hidden=24, experts=5, experts_per_token=2)
DENSE = dataclasses.replace(LAYER, experts=0, experts_per_token=0)


def mixed(style: Style, **parts: Any) -> Transformer:
    """Experts of different number and size, a dense layer between them, on a carried stream."""
    narrow = dataclasses.replace(LAYER, width=16, mlp_hidden=11, experts=4, experts_per_token=3)
    return Transformer(Shape((LAYER, DENSE, narrow, LAYER), 24), ModelConfig(97, 16, style, **parts), seed=1)


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(97, shape, generator=torch.Generator().manual_seed(1))


def one_layer(layer: LayerShape, config: ModelConfig, seed: int = 0) -> MoE:
    """In float64, every weight and bias random."""
    moe = MoE(layer, config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return moe


def loop_over_experts(moe: MoE, layer: LayerShape, config: ModelConfig, x: Tensor) -> tuple[Tensor, Tensor]:
    """The update by the definition, and the router's logits: every expert sees every token; most weights are zero."""
    normed = moe.norm(x)
    logits = normed @ moe.router.weight.T
    kept = logits >= logits.sort(dim=-1, descending=True).values[..., layer.experts_per_token - 1, None]
    weights = torch.softmax(logits.masked_fill(~kept, -math.inf), dim=-1)
    update = torch.zeros_like(x)
    for expert in range(layer.experts):
        into, back = moe.input.weight[expert], moe.output.weight[expert]
        hidden = normed @ into.T
        if moe.input.bias is not None:
            hidden = hidden + moe.input.bias.view(layer.experts, -1)[expert]
        if config.activation == "swiglu":
            hidden = functional.silu(hidden[..., : layer.mlp_hidden]) * hidden[..., layer.mlp_hidden :]
        else:
            hidden = functional.gelu(hidden, approximate="tanh")
        out = hidden @ back.T
        if moe.output.bias is not None:
            out = out + moe.output.bias.view(layer.experts, -1)[expert]
        update = update + weights[..., expert, None] * out
    return update, logits


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equals_a_loop_over_experts(data: st.DataObject) -> None:
    """Updates, routers' loss, and the gradient of everything; experts that got no token included."""
    experts = data.draw(st.integers(1, 9))
    layer = LayerShape(
        width=data.draw(st.integers(2, 12)), heads=0, kv_heads=0, head_dim=0, mlp_hidden=data.draw(st.integers(1, 12)),
        experts=experts, experts_per_token=data.draw(st.integers(1, experts)),
    )  # fmt: skip
    style: Style = data.draw(st.sampled_from(["gpt2", "llama"]))
    config = dataclasses.replace(ModelConfig(97, 16, style), bias=data.draw(st.booleans()))
    moe = one_layer(layer, config, seed=data.draw(st.integers(0, 99)))
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(2, data.draw(st.integers(1, 7)), layer.width, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    inputs = [x, *moe.parameters()]

    update, routing = moe(x)
    found = [update, *torch.autograd.grad(update.square().sum() + router_loss([routing]), inputs)]

    expected_update, logits = loop_over_experts(moe, layer, config, x)
    logits = logits.flatten(0, 1)
    chosen = logits.argsort(dim=-1, descending=True)[:, : layer.experts_per_token]
    shares = torch.tensor([(chosen == e).double().mean() for e in range(experts)]).double()
    balance = experts * (shares * torch.softmax(logits, dim=-1).mean(dim=0)).sum()
    loss = balance + 0.1 * logits.exp().sum(dim=-1).log().square().mean()
    expected = [expected_update, *torch.autograd.grad(expected_update.square().sum() + loss, inputs)]
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)
    assert routing.counts().tolist() == [int((chosen == e).sum()) for e in range(experts)]


def test_nothing_is_dropped_however_uneven() -> None:
    """All tokens on one expert: the update is that of a dense MLP with its weights."""
    layer, config = dataclasses.replace(LAYER, experts_per_token=1), ModelConfig(97, 16)
    moe = one_layer(layer, config)
    x = torch.rand(3, 50, 32, dtype=torch.float64) + 0.1  # positive, so that one sign decides
    with torch.no_grad():
        moe.norm.weight.fill_(1.0)
        moe.router.weight.fill_(-1.0)
        moe.router.weight[3] = 1.0
    update, routing = moe(x)
    assert routing.counts().tolist() == [0, 0, 0, 150, 0]
    gate, up = (moe.norm(x) @ moe.input.weight[3].T).chunk(2, dim=-1)
    torch.testing.assert_close(update, functional.silu(gate) * up @ moe.output.weight[3].T)
    assert router_loss([routing]) > 4.9, "one of five: load balancing is near its largest"


def test_one_expert_is_a_dense_mlp() -> None:
    dense = Transformer(Shape((DENSE,) * 2, 32), ModelConfig(97, 16), seed=3)
    single = dataclasses.replace(LAYER, experts=1, experts_per_token=1)
    model = Transformer(Shape((single,) * 2, 32), ModelConfig(97, 16), seed=3)
    weights = dense.state_dict()
    for name in [name for name in weights if name.endswith(("mlp.input.weight", "mlp.output.weight"))]:
        weights[name] = weights[name].unsqueeze(0)
    for number in (0, 1):
        weights[f"layers.{number}.mlp.router.weight"] = torch.randn(1, 32)
    model.load_state_dict(weights)
    tokens = random_tokens(2, 16)
    torch.testing.assert_close(model(tokens), dense(tokens), rtol=0, atol=1e-6)


def test_router_loss_by_hand() -> None:
    """Two layers; even routing of even logits gives 1 + 0.1 log(experts)^2."""
    even = Routing(torch.zeros(4, 2), torch.tensor([[0], [1], [0], [1]]))
    assert router_loss([even]).item() == pytest.approx(1 + 0.1 * math.log(2) ** 2)
    all_to_one = Routing(torch.tensor([[0.0, -50.0]] * 4), torch.zeros(4, 1, dtype=torch.int64))
    assert router_loss([all_to_one]).item() == pytest.approx(2)
    assert router_loss([even, all_to_one]).item() == pytest.approx(3 + 0.1 * math.log(2) ** 2)
    two_of_four = Routing(torch.zeros(2, 4), torch.tensor([[0, 1], [2, 3]]))
    assert router_loss([two_of_four]).item() == pytest.approx(1 + 0.1 * math.log(4) ** 2)


# --- the network ------------------------------------------------------------------------------------------------------


@styles
def test_routings_come_layer_by_layer_and_change_nothing(style: Style) -> None:
    model, tokens = mixed(style), random_tokens(2, 16)
    routings: list[Routing] = []
    assert torch.equal(model.hidden(tokens, None, routings), model.hidden(tokens))
    assert [tuple(routing.logits.shape) for routing in routings] == [(32, 5), (32, 4), (32, 5)]
    assert [int(routing.counts().sum()) for routing in routings] == [64, 96, 64]


@styles
def test_every_parameter_gets_a_gradient_through_the_routers_too(style: Style) -> None:
    model = mixed(style)
    routings: list[Routing] = []
    hidden = model.hidden(random_tokens(4, 16), None, routings)
    torch.autograd.backward(hidden.square().sum() + router_loss(routings))
    for name, parameter in model.named_parameters():
        if name != "head.weight":
            assert parameter.grad is not None, name
            assert parameter.grad.count_nonzero() > 0, name


@styles
def test_later_tokens_change_nothing_before_them(style: Style) -> None:
    """No expert has a capacity that a later token could take."""
    model, tokens = mixed(style).double(), random_tokens(1, 16)
    other = tokens.clone()
    other[:, 9:] = (other[:, 9:] + 1) % 97
    torch.testing.assert_close(model(other)[:, :9], model(tokens)[:, :9], rtol=0, atol=1e-12)


@styles
def test_counted_parameters_and_flops(style: Style) -> None:
    model = mixed(style)
    counted = budget(model.shape, model.config)
    assert counted.parameters == model.parameter_count
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(random_tokens(3, 16))
    assert counter.get_total_flops() == 3 * 16 * counted.flops_per_token
    with torch.device("meta"):
        on_meta = Transformer(model.shape, model.config)
    assert on_meta.parameter_count == counted.parameters


def test_flops_of_grouped_products_are_those_of_the_products_in_them() -> None:
    """The formula that the counter is given, against plain products that it counts by itself; backward too."""
    rows = torch.randn(10, 6, requires_grad=True)
    weights = torch.randn(3, 4, 6, requires_grad=True)
    ends = torch.tensor([4, 4, 10], dtype=torch.int32)

    def flops(grouped: bool) -> int:
        with FlopCounterMode(display=False) as counter:
            if grouped:
                product = grouped_linear(rows, weights, ends)
            else:
                product = torch.cat([rows[:4] @ weights[0].T, rows[4:] @ weights[2].T])
            torch.autograd.backward(product.square().sum())
        return int(counter.get_total_flops())

    assert flops(grouped=True) == flops(grouped=False) == 3 * 2 * 10 * 6 * 4


def test_grouped_operations_are_well_formed() -> None:
    """Schema, derivatives and shapes without data, as torch checks them."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    ends = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    linear = (random(7, 5).requires_grad_(), random(4, 3, 5).requires_grad_(), ends)
    torch.library.opcheck(grouped_linear, linear)
    torch.library.opcheck(grouped_outer, (random(7, 3), random(7, 5), ends))
    assert torch.autograd.gradcheck(grouped_linear, linear)


@styles
def test_how_it_starts(style: Style) -> None:
    """As dense matrices do, each expert with numbers of its own; biases at zero; not a number left unset."""
    layer = LayerShape(width=64, heads=2, kv_heads=2, head_dim=8, mlp_hidden=96, experts=4, experts_per_token=2)
    model = Transformer(Shape((layer,) * 2, 48), ModelConfig(97, 16, style), seed=5)
    for name, weight in model.named_parameters():
        if ".mlp.router." in name or ".mlp.input.weight" in name:
            assert weight.std().item() == pytest.approx(matrix_std(64), rel=0.15), name
        elif ".mlp.output.weight" in name:
            assert weight.std().item() == pytest.approx(matrix_std(64) / 2, rel=0.05), name
        elif name.endswith("bias"):
            assert weight.count_nonzero() == 0, name
    again = Transformer(model.shape, model.config, seed=5)
    for left, right in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(left, right)
    first = dict(model.named_parameters())["layers.0.mlp.input.weight"]
    assert not torch.equal(first[0], first[1])


@styles
def test_stacked_matrices_decay_and_their_biases_do_not(style: Style) -> None:
    model = mixed(style)
    groups = {name: group for group in Optimizer(model, OptimizerSection()).groups for name in group.parameters}
    for name, parameter in model.named_parameters():
        vector = "norm" in name or name.endswith("bias")
        assert (groups[name].weight_decay == 0) == vector, name
        assert (parameter.ndim == 1) == vector, name
    assert dict(model.named_parameters())["layers.0.mlp.input.weight"].ndim == 3


@styles
def test_bfloat16_rounds_products_and_not_the_choice(style: Style) -> None:
    moe = one_layer(LAYER, ModelConfig(97, 16, style)).float()
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
    exact, expected = moe(x)
    with torch.autocast("cpu", torch.bfloat16):
        update, routing = moe(x)
    assert torch.equal(routing.logits, expected.logits)
    assert torch.equal(routing.chosen, expected.chosen)
    assert 0 < (update - exact).abs().max() < 0.02 * exact.abs().max()


@styles
def test_bfloat16_in_the_network(style: Style) -> None:
    """The stream and every gradient stay float32."""
    model = mixed(style)
    routings: list[Routing] = []
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.hidden(random_tokens(2, 16), None, routings)
    assert hidden.dtype == torch.float32
    torch.autograd.backward(hidden.square().sum() + router_loss(routings))
    for name, parameter in model.named_parameters():
        assert name == "head.weight" or (parameter.grad is not None and parameter.grad.dtype == torch.float32), name


@pytest.mark.slow
@styles
def test_compiles_as_one_graph(style: Style) -> None:
    model, tokens = mixed(style), random_tokens(2, 16)
    compiled = torch.compile(model.hidden, fullgraph=True)
    gradients = []
    for hidden_of in (model.hidden, compiled):
        routings: list[Routing] = []
        hidden = hidden_of(tokens, None, routings)
        assert len(routings) == 3
        loss = hidden.square().sum() + router_loss(routings)
        wanted = [parameter for name, parameter in model.named_parameters() if name != "head.weight"]
        gradients.append([loss, *torch.autograd.grad(loss, wanted)])
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-3)
