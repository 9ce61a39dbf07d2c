"""The processes that train one run together: who they are, and the few numbers on which all of them agree.

A process learns its place from the environment that torchrun gives it. One process alone makes no process group, and
everything here costs it nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]  # public, but not in its list of names
from torch.distributed.rendezvous import rendezvous

from entasis.errors import ConfigError, EntasisError
from entasis.run.config import RunConfig
from entasis.run.sections import ParallelSection

_ROLL_CALL_SECONDS = 15.0
"""How long ranks whose exchange failed wait for the others to say that they are there."""


class LostRankError(EntasisError):
    """Another rank ended, or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """One of the processes that train a run, and how many they are."""

    rank: int = 0
    """From 0, over all machines."""
    size: int = 1
    local: int = 0
    """From 0, on this machine; the number of its GPU."""
    grouped: bool = False
    """Whether there is a process group."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where numbers that are exchanged lie."""
    group: ProcessGroup | None = None
    """Through which they are exchanged; the default one if None."""

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and speaks."""
        return self.rank == 0

    def share(self, config: RunConfig) -> tuple[int, int]:
        """Sequences [start, stop) of every global batch that are this rank's.

        Raises:
            ConfigError: the batch cannot be cut into equal shares of whole micro-batches.
        """
        train, sequences = config.train, config.batch_sequences
        if sequences % (train.micro_batch * self.size):
            raise ConfigError(
                f"train.batch_tokens {train.batch_tokens} / model.context {config.model.context} = {sequences} "
                f"sequences, which {self.size} ranks cannot share in passes of train.micro_batch {train.micro_batch}; "
                f"make it a multiple of {train.micro_batch * self.size} sequences, or change micro_batch or the ranks"
            )
        each = sequences // self.size
        return self.rank * each, (self.rank + 1) * each

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, the same bits on each; one rank's own tensor is given back."""
        if not self.grouped:
            return tensor
        tensor = tensor.to(self.device)
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def total(self, number: int) -> int:
        """The sum of a number over ranks."""
        return int(self.summed(torch.tensor(number)).item()) if self.grouped else number

    def agreed_signal(self, name: str | None) -> str | None:
        """The signal that any rank got, on all of them; None where none did."""
        if not self.grouped:
            return name
        number = self._largest(signal.Signals[name].value if name else 0)
        return signal.Signals(number).name if number else None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what one rank does, or may fail at, alone: no rank goes on before all are done, or if one failed.

        Raises:
            LostRankError: another rank failed, which says itself why.
        """
        done = False
        try:
            yield
            done = True
        finally:
            failed = self._largest(0 if done else self.rank + 1)
        if failed:
            raise LostRankError(f"rank {self.rank}: stops, since rank {failed - 1} failed")

    @contextmanager
    def joined(self, section: ParallelSection) -> Iterator[ExitStack]:
        """The process group, for as long as this lasts. NCCL on CUDA, gloo elsewhere.

        Gives a stack for what holds the group: it is left before the group ends.

        Raises:
            LostRankError: ranks did not come, ended, or did not answer in time; the line names them, where it can.
        """
        if not self.grouped:
            with ExitStack() as holders:
                yield holders
            return
        # This module's functions have the group that there is when it is first imported, by DDP say, as their default,
        # and would hold it for ever.
        import torch.distributed.nn.functional

        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.set_device(self.local)
        timeout = timedelta(seconds=section.timeout_seconds)
        store = None
        try:
            store, _, _ = next(rendezvous("env://", timeout=timeout))
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=timeout,
                device_id=torch.device("cuda", self.local) if cuda else None,
            )
            with ExitStack() as holders:
                yield holders
        except RuntimeError as error:
            if not _is_of_exchange(error):
                raise
            lost = "the ranks did not find each other" if store is None else _lost(store, self.rank, self.size)
            raise LostRankError(f"rank {self.rank}: {lost} ({' '.join(str(error).split())[:120]})") from None
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def aside(self, section: ParallelSection) -> Ranks:
        """The same ranks with a group of their own on the CPU, in which a thread of each can exchange meanwhile."""
        if not self.grouped:
            return self
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=section.timeout_seconds))
        return replace(self, group=group, device=torch.device("cpu"))

    def _largest(self, number: int) -> int:
        if not self.grouped:
            return number
        tensor = torch.tensor(number, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return int(tensor.item())


def ranks_here(section: ParallelSection, device: torch.device) -> Ranks:
    """This process's place, from torchrun's environment; alone without one.

    One process forms a group only where it is asked to by a strategy and was started by torchrun.

    Raises:
        ConfigError: the place cannot be read, or there is no such GPU, or no way to exchange between devices.
    """
    try:
        rank, size, local = (
            int(os.environ.get(*pair)) for pair in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
        )
    except ValueError:
        raise ConfigError(
            "RANK, WORLD_SIZE and LOCAL_RANK in the environment are numbers, as torchrun sets them"
        ) from None
    if size == 1 and ("RANK" not in os.environ or section.strategy == "auto"):
        return Ranks(device=device)
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(f"{name} is missing in the environment, beside WORLD_SIZE {size}; start with torchrun")
    if not os.environ["MASTER_PORT"].isdecimal():
        raise ConfigError(f"MASTER_PORT {os.environ['MASTER_PORT']} in the environment is no port; start with torchrun")
    if not 0 <= rank < size:
        raise ConfigError(f"RANK {rank} in the environment is not below WORLD_SIZE {size}; start with torchrun")
    if device.type == "mps":
        raise ConfigError("train.device: mps cannot exchange between processes; use one, or train.device cpu")
    if device.type == "cuda" and local >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {rank} is process {local} on its machine, which has {torch.cuda.device_count()} GPUs; "
            "start as many processes as there are GPUs"
        )
    return Ranks(rank, size, local, grouped=True, device=device)


def _is_of_exchange(error: RuntimeError) -> bool:
    """Whether an error comes from the exchange between ranks; gloo's are plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or any(
        sign in str(error) for sign in ("gloo", "Connection closed by peer", "Timed out waiting")
    )


def _lost(store: Store, own: int, size: int) -> str:
    """Which ranks do not answer, after an exchange failed. Those that live all come here, and say so."""

    def called(word: str, ranks: Iterable[int]) -> list[int]:
        """Says a word, and listens until all of `ranks` have; those that have not in time."""
        store.set(f"entasis/{word}/{own}", "yes")
        missing = list(ranks)
        deadline = time.monotonic() + _ROLL_CALL_SECONDS
        while missing and time.monotonic() < deadline:
            time.sleep(0.05)
            missing = [rank for rank in missing if not store.check([f"entasis/{word}/{rank}"])]
        return missing

    try:
        missing = called("there", range(size))
        if own == 0:  # the store may live in this process, and the others are still to hear who is there
            called("heard", set(range(1, size)) - set(missing))
        else:
            store.set(f"entasis/heard/{own}", "yes")
    except RuntimeError:  # the store lived in a process of the first machine
        return "rank 0 or its machine is lost; the other ranks stop"
    if not missing:
        return "an exchange between ranks failed, though all of them are there; look at the network"
    # One that still waits for this rank itself does not answer either; it will when this rank has left.
    named = f"one of ranks {', '.join(map(str, missing))}" if len(missing) > 1 else f"rank {missing[0]}"
    return f"{named} ended or did not answer in time; the other ranks stop"
