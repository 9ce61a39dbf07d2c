"""Opening a run again: its configuration, its trained model, its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from entasis.data.tokenizers import Tokenizer, load_tokenizer
from entasis.errors import EntasisError
from entasis.model.transformer import Transformer
from entasis.run.checkpoint import Checkpoint, load_newest
from entasis.run.config import RunConfig
from entasis.run.folder import RunFolder
from entasis.run.parts import own_part
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import Shape


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """A run as its newest good checkpoint left it; the model is on the CPU, in evaluation mode."""

    config: RunConfig
    model: Transformer
    step: int
    own_tokenizer: Tokenizer | None
    """None: the run's data, made by another program, came without one."""

    @property
    def tokenizer(self) -> Tokenizer:
        """What turns the model's tokens into text.

        Raises:
            EntasisError: there is none.
        """
        if self.own_tokenizer is None:
            raise EntasisError(
                f"{self.config.out}: trained on {self.config.data.sources[0].format} files, which carry no tokenizer, "
                "so its tokens cannot become text; generate needs a run on data of `entasis prepare`"
            )
        return self.own_tokenizer


def load_run(path: Path, report: Callable[[str], None] = print) -> LoadedRun:
    """Opens a run folder.

    Raises:
        EntasisError: there is no run or no good checkpoint, or the checkpoint is of another shape than the folder says.
    """
    folder = RunFolder(path)
    if not folder.shape_file.exists():
        raise EntasisError(
            f"{path}: not a run folder (no {folder.shape_file.name}); `entasis train` makes one, and a comparison "
            "keeps its own under runs/"
        )
    config = folder.read_config()
    checkpoint = load_newest(folder.checkpoints, report)
    if checkpoint is None:
        raise EntasisError(f"{path}: no checkpoint yet; `entasis train` goes on with this run")
    model = Transformer(folder.read_shape(), _design(checkpoint)[1])
    restore_model(model, checkpoint)
    foreign = config.data.sources[0].format != "entasis"
    tokenizer = None if foreign else load_tokenizer(folder.tokenizer)
    return LoadedRun(config, model.eval(), checkpoint.step, tokenizer)


def restore_model(model: Transformer, checkpoint: Checkpoint) -> None:
    """Copies a checkpoint's weights into a model of the same shape and block.

    Raises:
        EntasisError: shape or block differ, even where all tensors would fit; names the first layer that differs.
    """
    saved, block = _design(checkpoint)
    if saved != model.shape:
        raise EntasisError(
            f"the checkpoint of step {checkpoint.step} has another shape: {_difference(saved, model.shape)}"
        )
    if block != model.config:
        names = [name for name, value in block.to_dict().items() if value != model.config.to_dict()[name]]
        raise EntasisError(
            f"the checkpoint of step {checkpoint.step} has another block: "
            + ", ".join(f"{n} {block.to_dict()[n]!r} instead of {model.config.to_dict()[n]!r}" for n in names)
        )
    own = model.state_dict()
    if own.keys() != checkpoint.model.keys():
        raise EntasisError(f"the checkpoint of step {checkpoint.step} holds other weights than this model has")
    with torch.no_grad():
        for name, tensor in own.items():
            stored = checkpoint.model[name]
            if stored.shape != tensor.shape or stored.dtype != tensor.dtype:
                raise EntasisError(
                    f"weight {name}: stored as {stored.dtype} {tuple(stored.shape)}, expected {tensor.dtype} "
                    f"{tuple(tensor.shape)}"
                )
            tensor.copy_(own_part(stored, tensor))


def _design(checkpoint: Checkpoint) -> tuple[Shape, ModelConfig]:
    """Shape and block of a checkpoint."""
    try:
        return Shape.from_dict(checkpoint.state["shape"]), ModelConfig.from_dict(checkpoint.state["block"])
    except EntasisError as error:
        raise EntasisError(f"the checkpoint of step {checkpoint.step} was altered: {error}") from None


def _difference(saved: Shape, given: Shape) -> str:
    if len(saved.layers) != len(given.layers):
        return f"{len(saved.layers)} layers instead of {len(given.layers)}"
    for number, (was, now) in enumerate(zip(saved.layers, given.layers, strict=True), start=1):
        if was != now:
            return f"layer {number} was {was} and is now {now}"
    return (
        f"embed_width {saved.embed_width} and unembed_width {saved.unembed_width} "
        f"instead of {given.embed_width} and {given.unembed_width}"
    )
