"""Activation checkpointing changes what is kept between the passes, and not one bit of what they give."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import entasis
from entasis.bench.plan import activation_bytes
from entasis.data.documents import Sources
from entasis.data.prepare import Preparation, prepare_data
from entasis.evaluate.held_out import held_out_loss
from entasis.model.device import choose_computation
from entasis.model.loss import summed_cross_entropy
from entasis.model.moe import Routing, router_loss
from entasis.model.recompute import Recomputation, recompute_activations
from entasis.model.transformer import Transformer
from entasis.run.config import RunConfig
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape
from entasis.train.loop import train

CONTEXT, VOCAB = 96, 61
LLAMA = ModelConfig(vocab_size=VOCAB, context=CONTEXT)
GPT2 = ModelConfig(vocab_size=VOCAB, context=CONTEXT, style="gpt2")

HOW: list[Recomputation] = ["block", "selective"]
MakeConfig = Callable[..., RunConfig]


def of(family: str, config: ModelConfig = LLAMA, **settings: Any) -> Shape:
    return entasis.family(family, **{"layers": 4, "width": 48, "heads": 4, "config": config, **settings})


def with_resize(resize: Any) -> ModelConfig:
    return ModelConfig(vocab_size=VOCAB, context=CONTEXT, resize=resize)


BOWTIE = of("bowtie", multiple=16)
MOE = of("uniform", experts=4, experts_per_token=2, expert_hidden=24)
ODD = Shape(
    (
        LayerShape(width=48, heads=4, kv_heads=2, head_dim=12, mlp_hidden=96, window=20),
        LayerShape(width=32, heads=2, kv_heads=1, head_dim=8, mlp_hidden=64, value_dim=12),
        LayerShape(width=16, heads=0, kv_heads=0, head_dim=0, mlp_hidden=64),
        LayerShape(width=32, heads=2, kv_heads=2, head_dim=16, mlp_hidden=0),
        LayerShape(width=48, heads=2, kv_heads=2, head_dim=16, mlp_hidden=16, experts=3, experts_per_token=1),
    ),
    embed_width=40,
)
"""Windows, values of another width, missing parts, experts."""

MODELS: dict[str, tuple[Shape, ModelConfig]] = {
    "uniform": (of("uniform"), LLAMA),
    "gpt2": (of("uniform", GPT2), GPT2),
    "prism": (entasis.prism(width=48, heads=[1, 2, 4, 4], config=LLAMA), LLAMA),
    "bowtie": (BOWTIE, LLAMA),
    "moe": (MOE, LLAMA),
    "odd": (ODD, LLAMA),
    "windows": (Shape((LayerShape(48, 4, 2, 12, 96, window=40),) * 4, 48), LLAMA),
    "zero": (BOWTIE, with_resize("zero")),
    "projection": (BOWTIE, with_resize("projection")),
    "gated": (BOWTIE, with_resize("gated")),
    "interpolation": (BOWTIE, with_resize("interpolation")),
    "constant": (of("bowtie", with_resize("constant"), multiple=16), with_resize("constant")),
}


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that operations made and that are still held."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self._seen:
                storage = tensor.untyped_storage()
                self._seen.add(storage)
                weakref.finalize(storage, self._freed, storage.nbytes())
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
        return out

    def _freed(self, size: int) -> None:
        self.bytes -= size


def random_ids(batch: int = 2) -> Tensor:
    return torch.randint(VOCAB, (batch, CONTEXT), generator=torch.Generator().manual_seed(1))


def documents() -> Tensor:
    return torch.arange(CONTEXT).div(37, rounding_mode="floor").expand(2, -1)


def step(
    model: Transformer, packed: Tensor | None = None, hidden: Callable[..., Tensor] | None = None
) -> tuple[list[Tensor | None], int]:
    """Loss and gradients of a step, and how many routers reported."""
    tokens, routings = random_ids(), list[Routing]()
    states = (hidden or model.hidden)(tokens, packed, routings)
    loss = summed_cross_entropy(states.flatten(0, 1), model.head_weight, tokens.flatten()) / tokens.numel()
    total = loss + 0.01 * router_loss(routings) if routings else loss
    torch.autograd.backward(total)
    return [total.detach(), *(parameter.grad for parameter in model.parameters())], len(routings)


def assert_same(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None], tolerance: float = 0) -> None:
    assert len(found) == len(wanted)
    for these, those in zip(found, wanted, strict=True):
        torch.testing.assert_close(these, those, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("name", "packed", "precision"),
    [*((name, False, "float32") for name in MODELS), ("odd", True, "float32"), ("odd", False, "bf16"),
     ("bowtie", True, "bf16")],
)  # fmt: skip
def test_losses_and_gradients_are_the_same_bits(name: str, how: Recomputation, packed: bool, precision: str) -> None:
    shape, config = MODELS[name]
    inside = documents() if packed else None
    results = []
    each: Recomputation
    for each in ("none", how):
        model = Transformer(shape, config, seed=1)
        names = list(model.state_dict())
        recompute_activations(model, each)
        assert list(model.state_dict()) == names
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            results.append(step(model, inside))
    (plain, routers), (recomputed, recomputed_routers) = results
    assert_same(recomputed, plain)
    assert recomputed_routers == routers == sum(layer.experts > 0 for layer in shape.layers)


@pytest.mark.parametrize("how", HOW)
def test_a_block_runs_again_for_its_gradient_alone(how: Recomputation, monkeypatch: pytest.MonkeyPatch) -> None:
    from entasis.model import mlp

    runs = 0
    plain = mlp.activate

    def counted(hidden: Tensor, *, gated: bool) -> Tensor:
        nonlocal runs
        runs += 1
        return plain(hidden, gated=gated)

    monkeypatch.setattr(mlp, "activate", counted)
    model = Transformer(of("uniform"), LLAMA)
    recompute_activations(model, how)
    with torch.no_grad():
        model(random_ids())
    assert runs == 4
    step(model)
    assert runs == 12


@pytest.mark.parametrize("how", HOW)
def test_evaluation_keeps_and_recomputes_nothing(how: Recomputation, make_config: MakeConfig) -> None:
    from entasis.data.dataset import TokenData
    from entasis.data.stream import held_out_batches

    config = make_config()
    data = TokenData.open(Path(config.data.path))
    losses, peaks = [], []
    each: Recomputation
    for each in ("none", how):
        model = Transformer(config.design(257).shape, config.block(257))
        recompute_activations(model, each)
        batches = held_out_batches(
            data.held_out, context=16, batch_sequences=2, tokens=64, document_mask=False, eos_id=data.eos_id
        )
        with LiveTensors() as live:
            losses.append(held_out_loss(model, batches, choose_computation("cpu", "fp32", 1)))
        peaks.append(live.peak)
    assert losses[0] == losses[1]
    assert peaks[0] == peaks[1]


def held(shape: Shape, config: ModelConfig, how: Recomputation) -> tuple[int, int]:
    """Bytes of activations that are held between the passes, and at the fullest of the backward pass."""
    model, tokens = Transformer(shape, config), random_ids(8)
    recompute_activations(model, how)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveTensors() as live:
        hidden = model.hidden(tokens)
        loss = summed_cross_entropy(hidden.flatten(0, 1), model.head_weight, tokens.flatten())
        between = live.bytes
        live.peak = 0
        torch.autograd.backward(loss)
    return between, live.peak


MEASURED = ["uniform", "gpt2", "prism", "bowtie", "moe"]


@pytest.mark.parametrize("name", MEASURED)
def test_less_is_held(name: str) -> None:
    (none, none_peak), (block, block_peak), (selective, selective_peak) = (
        held(*MODELS[name], how) for how in ("none", *HOW)
    )
    assert block < selective < none
    assert block < 0.3 * none
    assert selective < 0.75 * none
    assert block_peak < selective_peak < none_peak


@pytest.mark.parametrize("how", ["none", *HOW])
@pytest.mark.parametrize("name", [*MEASURED, "windows"])
def test_the_plan_estimates_what_is_held(name: str, how: Recomputation) -> None:
    shape, config = MODELS[name]
    estimate = activation_bytes(shape, config, 8 * CONTEXT, bf16=False, checkpointing=how)
    assert estimate == pytest.approx(held(shape, config, how)[1], rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_it_compiles_as_one_graph_that_keeps_less(how: Recomputation) -> None:
    kept: dict[str, int] = {}
    wanted, routers = step(Transformer(*MODELS["odd"], seed=1))
    each: Recomputation
    for each in ("none", how):
        model = Transformer(*MODELS["odd"], seed=1)
        recompute_activations(model, each)
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        torch._dynamo.reset()
        compiled = torch.compile(model.hidden, backend="aot_eager", fullgraph=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found, reported = step(model, None, compiled)
        assert reported == routers
        assert_same(found, wanted, tolerance=1e-5)
        kept[each] = sum(saved.values()) - 4 * model.parameter_count
    assert kept[how] < {"block": 0.5, "selective": 0.8}[how] * kept["none"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_is_the_same_run(
    optimizer: str,
    make_config: MakeConfig,
    quiet: Console,
    outcome: Callable[[Path], Any],
    assert_same_bits: Callable[[Any, Any], None],
    tmp_path: Path,
) -> None:
    ran = []
    for how in ("none", *HOW):
        config = make_config({
            "train.activation_checkpointing": how, "train.steps": 4, "optimizer.name": optimizer,
        }, out=tmp_path / how)  # fmt: skip
        train(config, quiet)
        ran.append(outcome(Path(config.out)))
    assert_same_bits(ran[1], ran[0])
    assert_same_bits(ran[2], ran[0])


def test_a_run_may_go_on_with_less_memory(
    make_config: MakeConfig,
    quiet: Console,
    outcome: Callable[[Path], Any],
    assert_same_bits: Callable[[Any, Any], None],
    tmp_path: Path,
) -> None:
    constant = {"schedule.name": "constant", "train.steps": 8}  # a schedule that does not know where the run ends
    train(make_config(constant, out=tmp_path / "whole"), quiet)
    train(make_config({**constant, "train.steps": 4}, out=tmp_path / "halves"), quiet)
    train(make_config({**constant, "train.activation_checkpointing": "block"}, out=tmp_path / "halves"), quiet)
    assert_same_bits(outcome(tmp_path / "halves"), outcome(tmp_path / "whole"))


@pytest.fixture(scope="module")
def long_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of some 40,000 bytes."""
    folder = tmp_path_factory.mktemp("long")
    lines = [f"The house at {number} stands by the river and counts {number * number} stones." for number in range(600)]
    (folder / "text.txt").write_text("\n\n".join(lines), encoding="utf-8")
    prepare_data(Preparation(Sources.find((str(folder / "text.txt"),)), held_out=0.3), folder / "data", processes=1)
    return folder / "data"


@pytest.mark.slow
def test_a_context_of_4096_trains_in_less_memory(
    make_config: MakeConfig,
    long_data: Path,
    quiet: Console,
    outcome: Callable[[Path], Any],
    assert_same_bits: Callable[[Any, Any], None],
    tmp_path: Path,
) -> None:
    near = {"width": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "mlp_hidden": 128, "window": 256}
    ran, peaks = [], []
    for how in ("none", "block"):
        config = make_config({
            "data.path": str(long_data),
            "model.context": 4096,
            "model.rotary_scaling": {"kind": "yarn", "factor": 4, "original_context": 1024},
            "shape": {"family": "explicit", "embed_width": 32, "layers": [near, near, near, {**near, "window": None}]},
            "train.activation_checkpointing": how,
            "train.batch_tokens": 8192,
            "train.micro_batch": 1,
            "train.steps": 3,
            "train.evaluate_every": 3,
            "schedule.warmup_steps": 0,
        }, out=tmp_path / how)  # fmt: skip
        with LiveTensors() as live:
            train(config, quiet)
        peaks.append(live.peak)
        ran.append(outcome(Path(config.out)))
    assert_same_bits(*ran)
    losses = [record["train_loss"] for record in ran[0].metrics]
    assert losses[-1] < losses[0] - 0.1, "it learns"
    assert peaks[1] < 0.6 * peaks[0]
