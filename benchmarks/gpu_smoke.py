"""Does training work on one GPU, and how fast? Started by `gpu_smoke.sh`, which makes the folder and removes it.

Every model is trained by `entasis train` under torchrun: a process group of one (NCCL), FSDP2, torch.compile, bfloat16,
on random tokens. First the models of a size together, which fills the compiler's cache; of each, the newest checkpoint
is then thrown away, as if the machine had been lost, and the same command goes on from the one before, alone on the
device. Its steps are timed, but for the first ones, and their losses compared with those of the first time.

Exit status: 0: done. 1: a run failed, or its losses came back too different. 2: there is no CUDA GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from entasis.run.environment import device_name
from entasis.run.folder import RunFolder
from entasis.shape.budget import budget
from entasis.train.peaks import peak_flops

_STOPPED = 15
"""Steps after which the second start goes on; the run has twice as many."""
_WARM_UP = 5
"""Steps after a start that are not timed: they compile, and fill the allocator."""
_TOLERANCE = 0.02
"""Nats between the losses of a step that is done twice: kernels add up in another order; a lost state shows more."""
_GPU = (
    "train.precision=bf16",
    "train.compile=true",
    "train.device=cuda",
    "train.batch_tokens=65536",
)
_TINY = (
    "train.precision=fp32",
    "train.compile=false",
    "train.device=cpu",
    "train.threads=1",
    "train.batch_tokens=256",
    "model.context=64",
)


@dataclass(frozen=True, slots=True)
class Model:
    """One line of the table."""

    name: str
    preset: str
    settings: tuple[str, ...]
    vocab_size: int = 50_257

    def run_folder(self, work: Path) -> RunFolder:
        """Where both starts train it."""
        return RunFolder(work / self.name.replace(" ", "-"))

    def command(self, work: Path) -> list[str]:
        """The same for both starts."""
        context = 64 if "model.context=64" in self.settings else 1024
        settings = (
            f"data={{path: {work / 'tokens.bin'}, format: nanogpt, vocab_size: {self.vocab_size}}}",
            f"out={self.run_folder(work).path}",
            "parallel.strategy=fsdp",
            f"train.steps={2 * _STOPPED}",
            f"train.checkpoint_every={_STOPPED}",
            "train.keep_checkpoints=2",
            f"train.evaluate_every={2 * _STOPPED}",
            f"train.evaluate_tokens={8 * context}",
            "schedule.warmup_steps=5",
            *self.settings,
        )
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        return [*torchrun, "-m", "entasis", "train", self.preset, *(word for each in settings for word in ("-s", each))]


def _models(*, tiny: bool) -> list[list[Model]]:
    """By size. The bowties store about what the others store; few distinct widths, so that there is less to compile."""
    if tiny:
        shapes = {
            "uniform": "{family: uniform, layers: 3, width: 32, heads: 4}",
            "prism": "{family: prism, width: 32, heads: [1, 2, 4]}",
            "bowtie": "{family: bowtie, layers: 3, width: 32, heads: 4, turn: 2, multiple: 8, match: parameters}",
        }
        tiny_settings = (*_TINY, "train.micro_batch=2")
        return [
            [
                Model(f"tiny {name}", "prism-124m-uniform", (*tiny_settings, f"shape={shape}"), vocab_size=257)
                for name, shape in shapes.items()
            ]
        ]
    bowtie = "{family: bowtie, head_dim: 64, bottleneck: 0.3, multiple: 256, match: parameters"
    return [
        [
            Model(f"{size} uniform", f"prism-{size.lower()}-uniform", settings),
            Model(f"{size} prism", f"prism-{size.lower()}", settings),
            Model(f"{size} bowtie", f"prism-{size.lower()}-uniform", (*settings, f"shape={bowtie}, {sizes}}}")),
        ]
        for size, sizes, settings in (
            ("124M", "layers: 12, width: 768, heads: 12", (*_GPU, "train.micro_batch=16")),
            ("354M", "layers: 24, width: 1024, heads: 16", (*_GPU, "train.micro_batch=8")),
        )
    ]


def main() -> int:
    """Trains and prints."""
    parser = argparse.ArgumentParser(prog="gpu_smoke.sh", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU, not compiled")
    parser.add_argument("--only", default="", help="models whose name holds this, as 124M or prism")
    parser.add_argument("--at-once", type=int, default=3, help="first starts at once; 1 for a GPU of less than 64 GB")
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        print("gpu_smoke: there is no CUDA GPU here; --tiny tries the same on the CPU", file=sys.stderr)
        return 2

    began = time.monotonic()
    device = torch.device("cpu" if arguments.tiny else "cuda")
    work: Path = arguments.folder
    sizes = [[each for each in size if arguments.only in each.name] for size in _models(tiny=arguments.tiny)]
    if not any(sizes):
        print(f"gpu_smoke: --only {arguments.only}: no model is called so", file=sys.stderr)
        return 2
    vocab_size = next(model.vocab_size for size in sizes for model in size)
    tokens = np.random.default_rng(0).integers(0, vocab_size, 20_000 if arguments.tiny else 8_000_000)
    tokens.astype(np.uint16).tofile(work / "tokens.bin")
    print(f"{device_name(device)}, torch {torch.__version__}, {'tiny' if arguments.tiny else 'FSDP2, compiled, bf16'}")
    print(f"{'model':<14} {'parameters':>12} {'tokens/s':>10} {'MFU':>5} {'peak GiB':>9}  losses after going on")
    good = True
    for models in sizes:
        for start in range(0, len(models), arguments.at_once):
            _train(models[start : start + arguments.at_once], work)
        for model in models:
            shutil.rmtree(model.run_folder(work).checkpoints / f"step-{2 * _STOPPED:08d}")
            _train([model], work)
            line, same = _line(model, work, device)
            print(line, flush=True)
            good = good and same
            shutil.rmtree(model.run_folder(work).path)
    print(f"in {time.monotonic() - began:.0f} s")
    return 0 if good else 1


def _train(models: Sequence[Model], work: Path) -> None:
    """Starts the models' commands together, and waits for all.

    Raises:
        SystemExit: one failed; what it said is shown.
    """
    said = {model.name: (work / f"{model.name}.txt").open("w+", encoding="utf-8") for model in models}
    started = [
        (model, subprocess.Popen(model.command(work), stdout=said[model.name], stderr=subprocess.STDOUT))
        for model in models
    ]
    try:
        failed = [model for model, process in started if process.wait()]
    finally:
        for _, process in started:
            process.terminate()
            process.wait()
    for model in failed:
        said[model.name].seek(0)
        lines = said[model.name].read().splitlines()
        own = [line for line in lines if line.startswith("error: ")]  # else torchrun's page hides it
        print(f"gpu_smoke: {model.name} failed:", *(own or lines[-30:]), sep="\n", file=sys.stderr)
    for file in said.values():
        file.close()
    if failed:
        raise SystemExit(1)


def _line(model: Model, work: Path, device: torch.device) -> tuple[str, bool]:
    """The table's line, and whether the losses came back."""
    folder = model.run_folder(work)
    config, shape = folder.read_config(), folder.read_shape()
    counted = budget(shape, config.block(model.vocab_size))
    records = [json.loads(line) for line in folder.metrics_file.read_text(encoding="utf-8").splitlines()]
    first, again = records[_STOPPED : 2 * _STOPPED], records[2 * _STOPPED :]
    steps = list(range(_STOPPED + 1, 2 * _STOPPED + 1))
    if not [record["step"] for record in first] == [record["step"] for record in again] == steps:
        raise SystemExit(f"gpu_smoke: {model.name}: the second start did not go on after step {_STOPPED}")
    if not list(folder.checkpoints.glob("*/shard-*")):
        raise SystemExit(f"gpu_smoke: {model.name}: no process group was formed, so that FSDP2 did not cut the model")
    apart = max(abs(left["train_loss"] - right["train_loss"]) for left, right in zip(first, again, strict=True))
    rate = median(record["tokens_per_second"] for record in again[_WARM_UP:])
    peak = peak_flops(device_name(device), torch.bfloat16)
    mfu = "-" if peak is None else f"{3 * counted.flops_per_token * rate / peak[0]:.1%}"
    memory = re.findall(r"([\d.]+) GiB at most", folder.log_file.read_text(encoding="utf-8"))
    losses = "the same" if apart == 0 else f"up to {apart:.1e} apart" + (" (TOO FAR)" if apart > _TOLERANCE else "")
    gib = memory[-1] if memory else "-"
    line = f"{model.name:<14} {counted.parameters:>12,} {rate:>10,.0f} {mfu:>5} {gib:>9}  {losses}"
    return line, apart <= _TOLERANCE


if __name__ == "__main__":
    sys.exit(main())
