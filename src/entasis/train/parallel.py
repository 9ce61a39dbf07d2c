"""One model on several ranks: copied to each (DDP), cut among all (FSDP2), or cut among groups of them (hybrid).

Whatever the strategy, the gradient is the sum over the ranks of what each finds in its share of the batch. The loss
is divided by the targets of the whole batch before the backward pass, so that the sum is the gradient of one mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from entasis.errors import ConfigError
from entasis.model.device import Computation
from entasis.model.language_loss import LanguageLoss
from entasis.model.moe import Routing
from entasis.model.transformer import Transformer
from entasis.run.sections import ParallelSection
from entasis.train.ranks import Ranks


class SpreadModel:
    """A model as its ranks hold it; a context manager, which lets go of the process group.

    Args:
        model: on the CPU, the same on all ranks, and with its activation checkpointing. It is moved to the device and,
            where the strategy cuts it, its parameters become parts of what they were, under the same names.
        section: strategy and reduction dtype.
        ranks: who trains.
        computation: the device, and the dtype of products.
        compiled: whether to compile.

    Raises:
        ConfigError: the ranks cannot be grouped as asked.
    """

    def __init__(
        self, model: Transformer, section: ParallelSection, ranks: Ranks, computation: Computation, *, compiled: bool
    ) -> None:
        self._ranks = ranks
        self.cut = ranks.grouped and section.strategy in {"fsdp", "hybrid"}
        """Whether each rank holds a part of the model alone."""
        self.loss = LanguageLoss(model)
        """From tokens and targets to the summed loss on this rank, for passes without gradients."""
        if not ranks.grouped:
            model.to(computation.device)
            self._module: Any = LanguageLoss(model, torch.compile(model.hidden)) if compiled else self.loss
            return
        if section.reduce_dtype == "bf16" and not self.cut and ranks.device.type != "cuda":
            raise ConfigError(
                f"parallel.reduce_dtype: bf16 under ddp needs CUDA, and this is {ranks.device.type}; choose fp32, or "
                "parallel.strategy fsdp"
            )
        if compiled:
            compile_blocks(model)
        reduced = torch.bfloat16 if section.reduce_dtype == "bf16" else torch.float32
        if self.cut:
            _cut(self.loss, model, _mesh(section, ranks), computation.dtype, reduced)
            self._module = self.loss
        else:
            model.to(computation.device)
            self._module = torch.nn.parallel.DistributedDataParallel(self.loss)
            if reduced != torch.float32:
                from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

                self._module.register_comm_hook(None, bf16_compress_hook)

    def __enter__(self) -> SpreadModel:
        return self

    def __exit__(self, *_: object) -> None:
        """DDP must not outlive the group's end: whoever drops the group last waits for its threads, and DDP would do so
        while it keeps the interpreter from them."""
        self._module = None

    @contextmanager
    def passing(self, *, last: bool) -> Iterator[None]:
        """Around the forward and backward pass of a micro-batch: ranks exchange gradients after the last one alone."""
        if self.cut:
            self._module.set_requires_gradient_sync(last)
        replicated = self._ranks.grouped and not self.cut
        with self._module.no_sync() if replicated and not last else nullcontext():
            yield
        if replicated and last:
            for parameter in self._module.parameters():  # DDP has divided by the number of ranks
                if parameter.grad is not None:
                    parameter.grad.mul_(self._ranks.size)

    def loss_of_pass(
        self,
        tokens: Int[Tensor, "batch time"],
        targets: Int[Tensor, "batch time"],
        documents: Int[Tensor, "batch time"] | None,
    ) -> tuple[Float[Tensor, ""], list[Routing]]:
        """The summed loss over a micro-batch, within `passing`, and what the routers decided."""
        result: tuple[Tensor, list[Routing]] = self._module(tokens, targets, documents)
        return result

    def settle(self) -> None:
        """After passes without gradients: lets go of weights that they gathered."""
        if self.cut:
            self._module.reshard()


def _mesh(section: ParallelSection, ranks: Ranks) -> DeviceMesh:
    kind = ranks.device.type
    if section.strategy == "fsdp":
        return init_device_mesh(kind, (ranks.size,), mesh_dim_names=("shard",))
    shards = section.shards
    if shards is None or ranks.size % shards:
        raise ConfigError(
            f"parallel.shards {shards}: hybrid cuts the model among so many ranks, and it must divide the "
            f"{ranks.size} ranks that there are"
        )
    return init_device_mesh(kind, (ranks.size // shards, shards), mesh_dim_names=("replicate", "shard"))


def _cut(loss: LanguageLoss, model: Transformer, mesh: DeviceMesh, compute: torch.dtype, reduced: torch.dtype) -> None:
    """Cuts the parameters of each block, and then those that are left, among the mesh's shards.

    What is kept and stepped on stays in float32. Blocks are gathered in the dtype of their products; embedding, final
    norm and head in float32, since the stream, the norm and the loss are computed in it.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    in_blocks = MixedPrecisionPolicy(
        param_dtype=None if compute == torch.float32 else compute, reduce_dtype=reduced, cast_forward_inputs=False
    )
    for _, block in model.blocks():
        fully_shard(block, mesh=mesh, mp_policy=in_blocks)
    fully_shard(loss, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduced, cast_forward_inputs=False))
    for module in loss.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def compile_blocks(model: Transformer) -> None:
    """Compiles block by block, since ranks exchange weights or gradients between blocks.

    Blocks that are alike and find their input in memory alike share a graph. The compiler gives up after a number of
    graphs of one function that suits models whose layers are alike, so it is raised: to four for each layer, with and
    without gradients, for whole batches and a last one.
    """
    layers = len(model.built_layers)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * layers)
    for _, block in model.blocks():
        block.compile(dynamic=False)
