"""The optimizer: what decays, what it carries, and what it refuses to take back."""

from __future__ import annotations

from typing import Literal, cast

import pytest
import torch
from torch import Tensor

from entasis.errors import EntasisError
from entasis.model.transformer import Transformer
from entasis.run.sections import OptimizerSection
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape
from entasis.train.optimizer import Optimizer

_SHAPE = Shape(
    (
        LayerShape(width=16, heads=2, kv_heads=1, head_dim=8, mlp_hidden=24),
        LayerShape(width=24, heads=2, kv_heads=2, head_dim=6, mlp_hidden=0),
    ),
    embed_width=16,
)


def _model(style: Literal["gpt2", "llama"], **parts: bool) -> Transformer:
    return Transformer(_SHAPE, ModelConfig(vocab_size=29, context=8, style=style, **parts), seed=1)  # type: ignore[arg-type]


def _backward(model: Transformer, seed: int) -> None:
    tokens = torch.randint(0, 29, (2, 8), generator=torch.Generator().manual_seed(seed))
    model(tokens).square().mean().backward()


def test_groups_of_a_llama_by_name() -> None:
    blocks, tables, vectors = Optimizer(_model("llama"), OptimizerSection(weight_decay=0.3)).groups
    assert (blocks.weight_decay, tables.weight_decay, vectors.weight_decay) == (0.3, 0.3, 0)
    assert set(vectors.parameters) == {
        "layers.0.attention.norm.weight",
        "layers.0.mlp.norm.weight",
        "layers.1.attention.norm.weight",
        "norm.weight",
    }
    assert set(tables.parameters) == {"embed.weight", "head.weight"}
    assert all(name.startswith("layers.") and "norm" not in name for name in blocks.parameters)


def test_groups_of_a_gpt2_by_name() -> None:
    model = _model("gpt2")
    blocks, tables, vectors = Optimizer(model, OptimizerSection()).groups
    assert set(tables.parameters) == {"embed.weight", "positions.weight"}, "tied: one table, counted once"
    assert all("norm" in name or name.endswith("bias") for name in vectors.parameters)
    assert sum("norm" in name for name in vectors.parameters) == 8
    assert any(name.endswith("bias") and "norm" not in name for name in vectors.parameters)
    assert blocks.count + tables.count + vectors.count == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_every_parameter_is_in_one_group_and_only_matrices_decay(style: Literal["gpt2", "llama"]) -> None:
    model = _model(style)
    optimizer = Optimizer(model, OptimizerSection(weight_decay=0.5))
    names = [name for group in optimizer.groups for name in group.parameters]
    assert sorted(names) == sorted(dict(model.named_parameters()))
    assert optimizer.describe().startswith("AdamW, weight decay 0.5 on 6 blocks (")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.1)
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if parameter.ndim >= 2 else 1
        torch.testing.assert_close(parameter.detach(), before[name] * factor, msg=name)


def test_adamw_as_published() -> None:
    """Decoupled decay and bias correction, against the formula in float64."""
    weight = torch.nn.Parameter(torch.tensor([[0.5, -1.0], [2.0, 0.25]]))
    model = torch.nn.Module()
    model.weight = weight
    section = OptimizerSection(weight_decay=0.1, betas=[0.8, 0.9], epsilon=1e-6)
    optimizer = Optimizer(cast(Transformer, model), section)
    expected = weight.detach().double()
    first, second = torch.zeros(2, 2).double(), torch.zeros(2, 2).double()
    for step, rate in enumerate((0.1, 0.02, 0.3), start=1):
        gradient = torch.tensor([[1.0, -2.0], [0.5, step]])
        weight.grad = gradient
        optimizer.step(rate)
        first = 0.8 * first + 0.2 * gradient
        second = 0.9 * second + 0.1 * gradient**2
        expected = expected * (1 - rate * 0.1)
        expected -= rate * (first / (1 - 0.8**step)) / ((second / (1 - 0.9**step)).sqrt() + 1e-6)
        torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-5, atol=1e-6)
        assert weight.grad is None, "gradients are dropped"


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_state_goes_out_and_in_by_name_and_the_next_step_is_the_same(style: Literal["gpt2", "llama"]) -> None:
    one = _model(style)
    first = Optimizer(one, OptimizerSection())
    assert first.state() == {}, "nothing before the first step"
    for seed in range(3):
        _backward(one, seed)
        first.step(0.01)
    state = {name: value.clone() for name, value in first.state().items()}
    assert {name.split(":")[0] for name in state} == {name for name, _ in one.named_parameters()}
    assert {name.split(":")[1] for name in state} == {"step", "exp_avg", "exp_avg_sq"}
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert all(value == 3 for name, value in state.items() if name.endswith(":step"))

    other = _model(style)
    other.load_state_dict(one.state_dict())
    second = Optimizer(other, OptimizerSection())
    second.load_state(state)
    for model, optimizer in ((one, first), (other, second)):
        _backward(model, 9)
        optimizer.step(0.007)
    for (name, left), (_, right) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(left, right), name
    assert all(torch.equal(value, second.state()[name]) for name, value in first.state().items())
    assert all(value == 3 for name, value in state.items() if name.endswith(":step")), "what was given is not changed"


def test_the_rate_is_that_of_the_step_and_nothing_else() -> None:
    """After taking state back, the first step uses the rate that it is given, not the initial one."""
    model = _model("llama")
    optimizer = Optimizer(model, OptimizerSection(learning_rate=100.0))
    _backward(model, 0)
    optimizer.step(1e-3)
    state = {name: value.clone() for name, value in optimizer.state().items()}
    fresh = Optimizer(model, OptimizerSection(learning_rate=100.0))
    fresh.load_state(state)
    before = model.embed.weight.detach().clone()
    _backward(model, 1)
    fresh.step(0.0)
    assert torch.equal(model.embed.weight, before)


def _bad_states(good: dict[str, Tensor]) -> list[tuple[str, dict[str, Tensor]]]:
    name = "norm.weight:exp_avg"
    return [
        (name, {key: value for key, value in good.items() if key != name}),
        (name, {**good, name: good[name].bfloat16()}),
        (name, {**good, name: good[name].double()}),
        (name, {**good, name: good[name][:-1]}),
        ("norm.weight:step", {**good, "norm.weight:step": torch.tensor(3)}),
        ("gone.weight:exp_avg", {**good, "gone.weight:exp_avg": torch.zeros(2)}),
    ]


@pytest.mark.parametrize("case", range(6))
def test_a_state_that_does_not_fit_is_refused_by_name(case: int) -> None:
    model = _model("llama")
    optimizer = Optimizer(model, OptimizerSection())
    _backward(model, 0)
    optimizer.step(1e-3)
    name, state = _bad_states(optimizer.state())[case]
    with pytest.raises(EntasisError, match=name):
        Optimizer(model, OptimizerSection()).load_state(state)


def test_block_matrices_take_their_own_rate() -> None:
    """The published recipe: block matrices at an eighth of the rate of tables and vectors."""
    model = _model("llama")
    optimizer = Optimizer(model, OptimizerSection(block_rate=0.125, weight_decay=0.0))
    assert "rate × 0.125" in optimizer.describe()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(0.01)
    for name, parameter in model.named_parameters():
        moved = before[name] - parameter.detach()  # Adam's first step is the rate itself
        rate = 0.01 / 8 if parameter.ndim == 2 and name.startswith("layers.") else 0.01
        torch.testing.assert_close(moved, torch.full_like(moved, rate), rtol=1e-3, atol=1e-7)


def test_muon_sees_each_matrix_of_a_fused_projection_by_itself() -> None:
    """Two steps equal torch's own Muon on the projections cut apart, and AdamW on the rest."""
    section = OptimizerSection(name="muon", weight_decay=0.1)
    model = _model("llama")
    optimizer = Optimizer(model, section)
    layer = _SHAPE.layers[0]
    sizes = [layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim, layer.kv_heads * layer.value_head_dim]
    weight = model.get_parameter("layers.0.attention.qkv.weight")
    apart = [torch.nn.Parameter(part.detach().clone()) for part in torch.split(weight, sizes)]
    muon = torch.optim.Muon(apart, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for seed in (1, 2):
        _backward(model, seed)
        assert weight.grad is not None
        for part, gradient in zip(apart, torch.split(weight.grad, sizes), strict=True):
            part.grad = gradient.clone()
        for group in muon.param_groups:
            group["lr"] = 0.02
        muon.step()  # type: ignore[no-untyped-call]
        optimizer.step(0.02)
        assert torch.equal(torch.cat([part.detach() for part in apart]), weight.detach())


def test_muon_goes_on_from_its_state() -> None:
    section = OptimizerSection(name="muon")
    whole, halves = _model("gpt2"), _model("gpt2")
    one, two = Optimizer(whole, section), Optimizer(halves, section)
    for seed in range(4):
        if seed == 2:
            state = {name: value.clone() for name, value in two.state().items()}
            two = Optimizer(halves, section)
            two.load_state(state)
        for model, optimizer in ((whole, one), (halves, two)):
            _backward(model, seed)
            optimizer.step(0.01)
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, halves.get_parameter(name)), name


def test_muon_leaves_the_routers_to_adamw() -> None:
    """The routers' names stand in a group of their own, which decays, has the blocks' rate and takes AdamW's step."""
    layer = LayerShape(width=16, heads=2, kv_heads=2, head_dim=8, mlp_hidden=8, experts=3, experts_per_token=2)
    shape = Shape((layer, _SHAPE.layers[0], layer), embed_width=16)
    model = Transformer(shape, ModelConfig(vocab_size=29, context=8), seed=1)
    section = OptimizerSection(name="muon", block_rate=0.5, weight_decay=0.1)
    optimizer = Optimizer(model, section)
    names = {group.name: set(group.parameters) for group in optimizer.groups}
    assert names["routers"] == {"layers.0.mlp.router.weight", "layers.2.mlp.router.weight"}
    assert names["blocks"] == {
        f"layers.{number}.{name}.weight"
        for number in range(3)
        for name in ("attention.qkv", "attention.out", "mlp.input", "mlp.output")
    }
    routers = next(group for group in optimizer.groups if group.name == "routers")
    assert (routers.rate, routers.weight_decay) == (0.5, 0.1)
    router = model.get_parameter("layers.0.mlp.router.weight")
    alone = torch.nn.Parameter(router.detach().clone())
    adamw = torch.optim.AdamW([alone], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for seed in (1, 2):
        _backward(model, seed)
        assert router.grad is not None
        alone.grad = router.grad.clone()
        adamw.step()
        optimizer.step(0.02)
    assert torch.equal(alone.detach(), router.detach())
    assert {name.split(":")[1] for name in optimizer.state() if "router" in name} == {"step", "exp_avg", "exp_avg_sq"}
    again = Optimizer(model, section)
    again.load_state({name: value.clone() for name, value in optimizer.state().items()})
    assert all(torch.equal(value, again.state()[name]) for name, value in optimizer.state().items())
    plain = {group.name for group in Optimizer(model, OptimizerSection()).groups}
    assert plain == {"blocks", "tables", "vectors"}, "under AdamW a router is a matrix of its block"
