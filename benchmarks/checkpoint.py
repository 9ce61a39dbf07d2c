"""What a checkpoint costs the steps around it: windows of steps with one save, by turns with windows without.

    python benchmarks/checkpoint.py [--preset prism-124m] [--context 1024] [--steps 12] [--rounds 2] [--folder FOLDER]

Trains the preset's shape on random tokens on the CPU with AdamW; a window of `steps` steps begins with a save or not.
Printed are the median time of a window of each kind and the share that the save adds, beside the time that the same
save takes with training standing still. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from entasis.model.language_loss import LanguageLoss
from entasis.model.transformer import Transformer
from entasis.run.config import load_config
from entasis.train.optimizer import Optimizer
from entasis.train.saver import Saver
from entasis.train.state import TrainState


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="prism-124m")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()

    context = arguments.context
    config = load_config(
        arguments.preset, [f"model.context={context}", f"train.batch_tokens={context}", "train.micro_batch=1"]
    )
    vocabulary = config.data.vocab_size or 50_257
    model = Transformer(config.design(vocabulary).shape, config.block(vocabulary), seed=0)
    state = TrainState(model, Optimizer(model, config.optimizer), "random")
    loss = LanguageLoss(model)

    def step() -> None:
        tokens = torch.randint(vocabulary, (arguments.batch, context + 1))
        summed, _ = loss(tokens[:, :-1], tokens[:, 1:])
        (summed / tokens[:, 1:].numel()).backward()
        state.optimizer.step(1e-4)
        state.step += 1

    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, Saver(Path(folder), keep=1) as saver:

        def window(*, save: bool) -> float:
            start = time.perf_counter()
            if save:
                saver.save(state.to_checkpoint())
            for _ in range(arguments.steps):
                step()
            saver.wait()  # what is not done after so many steps counts
            return time.perf_counter() - start

        window(save=True)  # pages, kernels, the first moments
        with_save, without = [], []
        for _ in range(arguments.rounds):
            without.append(window(save=False))
            with_save.append(window(save=True))
        start = time.perf_counter()
        saver.save(state.to_checkpoint())
        saver.wait()
        alone = time.perf_counter() - start
    print(f"{model.parameter_count:,} parameters, {arguments.steps} steps of {arguments.batch * context} tokens")
    print(f"without a save  {median(without):.2f} s  ({', '.join(f'{value:.2f}' for value in without)})")
    print(f"with a save     {median(with_save):.2f} s  ({', '.join(f'{value:.2f}' for value in with_save)})")
    print(f"added           {median(with_save) / median(without) - 1:+.1%}  (the save alone takes {alone:.2f} s)")


if __name__ == "__main__":
    main()
