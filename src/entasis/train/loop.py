"""The training loop, from top to bottom: open the data, build the model, go on where the run stopped, step, save."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from entasis.data.dataset import TokenSource
from entasis.data.mixed import source_progress
from entasis.data.stream import Batch, BatchStream
from entasis.errors import ConfigError
from entasis.evaluate.sources import held_out_losses
from entasis.model.device import choose_computation
from entasis.model.recompute import recompute_activations
from entasis.model.transformer import Transformer
from entasis.run.checkpoint import NonFiniteError, load_newest, remove_leftovers
from entasis.run.config import RunConfig
from entasis.run.data_files import check_data, record_data
from entasis.run.environment import device_name, environment_record
from entasis.run.files import naming
from entasis.run.folder import RunFolder
from entasis.run.objective import masking
from entasis.run.onlooker import OnlookerFolder
from entasis.run.open_data import open_data
from entasis.run.parts import whole
from entasis.shape.budget import budget
from entasis.train.interrupt import StopRequest
from entasis.train.memory import count_peak_from_here, peak_bytes
from entasis.train.monitor import Monitor, Throughput
from entasis.train.optimizer import Optimizer
from entasis.train.parallel import SpreadModel
from entasis.train.peaks import peak_flops
from entasis.train.ranks import ranks_here
from entasis.train.router import RouterStep
from entasis.train.saver import Saver
from entasis.train.schedule import learning_rate, warm_up_note
from entasis.train.state import TrainState
from entasis.train.track import Mirrors


def train(config: RunConfig, console: Console, *, label: str = "train", accept_data_change: bool = False) -> None:  # noqa: PLR0912, PLR0915 - reads in one go
    """Trains the run of `config` to its last step, from the newest good checkpoint if there is one.

    A run goes on only with the data that it began with, unless `accept_data_change` is set. Several processes that
    torchrun started train it together: each its share of every batch, and the first writes.

    Raises:
        ConfigError: the folder holds another run, or the device is not there.
        Interrupted: a signal asked to stop; the state is saved. Preempted, where a scheduler sent it.
        LostRankError: another process ended, or did not answer.
        NonFiniteError: a loss, gradient or weight was not finite; the last good checkpoint is kept.
    """
    computation = choose_computation(config.train.device, config.train.precision, config.train.threads)
    ranks = ranks_here(config.parallel, computation.device)
    start, stop_before = ranks.share(config)
    folder = RunFolder(Path(config.out)) if ranks.first else OnlookerFolder(Path(config.out))
    console = console if ranks.first else Console(quiet=True)

    def say(line: str) -> None:
        folder.log(line)
        console.print(f"{label}: {line}", markup=False, highlight=False, soft_wrap=True)

    with folder.locked(), ranks.joined(config.parallel) as holders:
        data = open_data(config.data, say)
        data.held_out.require_window(config.model.context)  # now, and not at the first evaluation
        design, block = config.design(data.vocab_size), config.block(data.vocab_size)
        environment = environment_record(computation.device)
        changes = folder.check(config, design.shape, environment)

        stream = BatchStream(
            data.train,
            context=config.model.context,
            batch_sequences=config.batch_sequences,
            seed=config.train.seed,
            document_mask=config.data.document_mask,
            eos_id=data.eos_id,
            masking=masking(config, data),
        )
        count_peak_from_here(computation.device)
        model = Transformer(design.shape, block, seed=config.train.seed)
        recompute_activations(model, config.train.activation_checkpointing)
        spread = holders.enter_context(
            SpreadModel(model, config.parallel, ranks, computation, compiled=config.train.compile)
        )
        state = TrainState(model, Optimizer(model, config.optimizer), data.fingerprint)
        with ranks.together():
            folder.mend_metrics()
            if ranks.first:
                remove_leftovers(folder.checkpoints)
        checkpoint = load_newest(folder.checkpoints, say)
        if checkpoint is not None:
            state.restore(checkpoint, other_data=accept_data_change)
            _require_no_more(state.step, config)
            if state.step == config.train.steps:
                say(f"{folder.path}: already finished, {state.step} of {config.train.steps} steps")
                return
            with ranks.together():
                if ranks.first:
                    check_data(folder, data, say, accept=accept_data_change)
            say(f"{folder.path}: goes on after step {state.step} of {config.train.steps}")
            if checkpoint.state["data_fingerprint"] != data.fingerprint:
                changes.append(f"the data, as accepted: {checkpoint.state['data_fingerprint']} -> {data.fingerprint}")
            for change in changes:
                say(f"changed since the run began: {change}")
        else:
            say(f"{model.parameter_count:,} parameters; {state.optimizer.describe()}")
        if note := warm_up_note(config):
            say(note)
        # Only now: a run that is refused above leaves the folder as it was.
        with ranks.together():
            folder.write(config, design.shape, environment)
            if ranks.first:
                record_data(folder, data)
                _save_tokenizer(folder, data)
        saved_step = state.step

        tokens_per_step = config.batch_sequences * config.model.context
        throughput = Throughput(tokens_per_step)
        monitor = Monitor(
            folder,
            console,
            label=label,
            step=state.step,
            steps=config.train.steps,
            flops_per_token=budget(design.shape, block).flops_per_token,
            peak=peak_flops(device_name(computation.device), computation.dtype, devices=ranks.size),
        )
        mirrors = Mirrors(config, folder, step=state.step, say=say, on=ranks.first)
        savers = ranks.aside(config.parallel) if spread.cut else None
        saver = Saver(folder.checkpoints, config.train.keep_checkpoints, savers)
        with monitor, mirrors, saver, StopRequest() as stop:
            while state.step < config.train.steps:
                throughput.start()
                batch = stream.batch(state.step, start, stop_before)
                rate = learning_rate(config, state.step)

                # The normaliser counts the targets of all ranks and micro-batches before the first backward pass, so
                # that the gradient is that of one mean over the step, however it is cut.
                counted = max(1, ranks.total(batch.counted))
                loss = torch.zeros((), device=computation.device)
                routers = RouterStep(design.shape, config.train.router_loss, tokens_per_step)
                for part, last in _micro_batches(batch, config.train.micro_batch):
                    documents = None if part.documents is None else computation.tensor(part.documents)
                    tokens, targets = computation.tensor(part.tokens), computation.tensor(part.targets)
                    with spread.passing(last=last):
                        with computation.autocast():
                            part_loss, routings = spread.loss_of_pass(tokens, targets, documents)
                        part_loss = part_loss / counted
                        routers.added_to(part_loss, routings).backward()  # type: ignore[no-untyped-call]
                    loss += part_loss.detach()
                loss = ranks.summed(loss)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip or math.inf)
                numbers = {"train_loss": loss.item(), "grad_norm": whole(norm).item()}
                skipped = _skipped(numbers["train_loss"], numbers["grad_norm"], state, stream, config, say)
                if skipped:
                    model.zero_grad(set_to_none=True)
                else:
                    state.optimizer.step(rate)
                state.step += 1
                state.tokens += tokens_per_step

                record: dict[str, Any] = {
                    "step": state.step,
                    "tokens": state.tokens,
                    **({"skipped": True} if skipped else numbers),
                    "learning_rate": rate,
                    "tokens_per_second": throughput.stop(),
                }
                finished = state.step == config.train.steps
                evaluated = finished or state.step % config.train.evaluate_every == 0
                record |= {} if skipped else routers.record(load=evaluated, summed=ranks.summed)
                if evaluated:
                    record |= held_out_losses(
                        spread.loss, config, data, computation, rank=ranks.rank, ranks=ranks.size, add=ranks.summed
                    )
                    record |= source_progress(stream, data, state.step)
                    spread.settle()
                    _require_finite_evaluation(record["val_loss"], state.step)
                monitor.step(record)
                mirrors.step(record)
                stop.name = ranks.agreed_signal(stop.name)
                if finished or stop.name or state.step % config.train.checkpoint_every == 0:
                    folder.sync_metrics()
                    with ranks.together():
                        if spread.cut or ranks.first:
                            saver.save(state.to_checkpoint())
                    saved_step = state.step
                if finished or stop.name:
                    saver.wait()
                if stop.name:  # also after the last step: what called this, a comparison say, has to stop
                    raise stop.stopped(f"step {saved_step} of {config.train.steps} is saved in {folder.path}")
        for name, epochs in record.get("source_epochs", {}).items():
            say(f"{name}: {record['source_tokens'][name]:,} tokens, {epochs:.3f} epochs")
        left_out = f" ({len(state.skipped)} left out)" if state.skipped else ""
        speed = monitor.speed(peak_bytes(computation.device))
        say(f"held-out loss {record['val_loss']:.4f} after {state.step} steps{left_out}, {speed}")


def _require_no_more(step: int, config: RunConfig) -> None:
    """A run is not cut short by asking for fewer steps than it has done."""
    if step > config.train.steps:
        raise ConfigError(
            f"train.steps: {config.out} holds a run of {step} steps, and {config.train.steps} are asked for; choose "
            "another `out`"
        )


def _save_tokenizer(folder: RunFolder, data: TokenSource) -> None:
    """The run's own copy; other programs' files of tokens come with none."""
    if tokenizer := data.tokenizer():
        with naming(folder.tokenizer):
            tokenizer.save(folder.tokenizer)


def _micro_batches(batch: Batch, sequences: int) -> Iterator[tuple[Batch, bool]]:
    """The parts of a batch, and of each whether it is the last."""
    for start in range(0, len(batch.tokens), sequences):
        stop = start + sequences
        yield batch.part(start, stop), stop >= len(batch.tokens)


def _skipped(
    loss: float, norm: float, state: TrainState, stream: BatchStream, config: RunConfig, say: Callable[[str], None]
) -> bool:
    """Whether the step is left out. Stops before the update; nothing that the step computed reaches the weights."""
    if math.isfinite(loss) and math.isfinite(norm):
        return False
    what = f"step {state.step + 1}: loss {loss:g}, gradient norm {norm:g}"
    where = f"after {state.tokens:,} tokens; {stream.describe(state.step)}"
    allowed = config.train.skip_bad_steps
    if len(state.skipped) < allowed:
        state.skipped.append(state.step + 1)
        say(f"{what} ({where}); left out, {len(state.skipped)} of at most {allowed} (train.skip_bad_steps)")
        return True
    raise NonFiniteError(
        f"{what} ({where}); the update was not made and the last checkpoint is kept; lower optimizer.learning_rate, or "
        "look at the data there" + (f"; {allowed} steps are left out already" if allowed else "")
    )


def _require_finite_evaluation(loss: float, step: int) -> None:
    """Stops before the step's checkpoint."""
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"step {step}: held-out loss {loss:g}; the last checkpoint is kept; lower optimizer.learning_rate"
        )
