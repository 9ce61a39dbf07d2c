"""What the tests of runs share: a small prepared text, tiny configurations, and processes that may be killed."""

from __future__ import annotations

import copy
import faulthandler
import multiprocessing
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from entasis.data.dataset import TokenData
from entasis.data.documents import Sources
from entasis.data.prepare import Preparation, prepare_data
from entasis.run.checkpoint import load_newest
from entasis.run.config import RunConfig, parse_config
from entasis.run.folder import RunFolder

CONTEXT = 16
WINDOWS = 20
"""Training windows of the small text: five steps of four sequences are exactly an epoch."""

_WORDS = ("sea", "land", "wind", "stone", "river", "house", "light", "dark", "bread", "water", "day", "came", "saw")


@pytest.fixture(autouse=True, scope="session")
def _hang_up_is_not_ignored() -> None:
    """As in a terminal, also where the tests are started with nohup; processes that they start inherit it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """One thread: fastest for tiny tensors, and a forked process cannot wait for threads that it does not have."""
    torch.set_num_threads(1)
    # A process that a shell started in the background ignores SIGINT, and the tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Outcome:
    """Everything that a run leaves and that must not depend on where it stopped."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    metrics: list[dict[str, Any]]
    """Without the measured rates."""


def _prepare(folder: Path, seed: int, documents: int) -> Path:
    source = random.Random(seed)
    texts = [" ".join(source.choices(_WORDS, k=source.randint(1, 4))) for _ in range(documents)]
    folder.mkdir()
    (folder / "text.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    sources = Sources.find((str(folder / "text.txt"),))
    prepare_data(Preparation(sources, held_out=0.3), folder / "data", processes=1)
    return folder / "data"


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder: bytes as tokens, short documents, 20 training windows of 16 tokens."""
    path = _prepare(tmp_path_factory.mktemp("small") / "text", seed=3, documents=33)
    data = TokenData.open(path)
    assert data.train.windows(CONTEXT) == WINDOWS
    assert data.held_out.windows(CONTEXT) >= 6
    return path


@pytest.fixture(scope="session")
def other_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another text, prepared in the same way."""
    return _prepare(tmp_path_factory.mktemp("other") / "text", seed=4, documents=33)


@pytest.fixture(scope="session")
def settings(small_data: Path) -> dict[str, Any]:
    """Plain settings of a tiny run: 12 steps of 4 sequences in 2 passes, half a second in all."""
    return {
        "data": {"path": str(small_data)},
        "model": {"style": "llama", "context": CONTEXT},
        "shape": {
            "family": "explicit",
            "embed_width": 24,
            "layers": [
                {"width": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp_hidden": 32},
                {"width": 16, "heads": 1, "kv_heads": 1, "head_dim": 8, "mlp_hidden": 24},
                {"width": 24, "heads": 2, "kv_heads": 2, "head_dim": 12, "mlp_hidden": 32},
            ],
        },
        "train": {
            "steps": 12,
            "batch_tokens": 4 * CONTEXT,
            "micro_batch": 2,
            "precision": "fp32",
            "device": "cpu",
            "threads": 1,
            "evaluate_every": 4,
            "evaluate_tokens": 4 * CONTEXT,
            "checkpoint_every": 3,
            "keep_checkpoints": 2,
        },
        "schedule": {"warmup_steps": 3},
        "out": "nowhere",
    }


@pytest.fixture
def make_config(settings: dict[str, Any], tmp_path: Path) -> Callable[..., RunConfig]:
    """`make_config({"train.steps": 3})`: the tiny run with some settings changed; into a folder of the test."""

    def make(changes: dict[str, Any] | None = None, *, out: Path | None = None) -> RunConfig:
        data = copy.deepcopy(settings)
        for name, value in {"out": str(out or tmp_path / "run"), **(changes or {})}.items():
            *sections, key = name.split(".")
            place = data
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = value
        return parse_config(data)

    return make


@pytest.fixture(scope="session")
def quiet() -> Console:
    """A console that shows nothing."""
    return Console(quiet=True)


@pytest.fixture(scope="session")
def outcome() -> Callable[[Path], Outcome]:
    """What the run in a folder left."""

    def read(path: Path) -> Outcome:
        folder = RunFolder(path)
        checkpoint = load_newest(folder.checkpoints, pytest.fail)
        assert checkpoint is not None
        metrics = [
            {name: value for name, value in record.items() if name != "tokens_per_second"}
            for record in folder.read_metrics()
        ]
        return Outcome(checkpoint.step, checkpoint.model, checkpoint.optimizer, checkpoint.state, metrics)

    return read


@pytest.fixture(scope="session")
def assert_same_bits() -> Callable[[Outcome, Outcome], None]:
    """Fails unless two runs left the same bits: weights, optimizer, state and metrics."""

    def check(left: Outcome, right: Outcome) -> None:
        assert left.step == right.step
        assert left.state == right.state
        assert left.metrics == right.metrics
        for these, those in ((left.model, right.model), (left.optimizer, right.optimizer)):
            assert these.keys() == those.keys()
            assert these, "nothing to compare"
            for name, tensor in these.items():
                assert tensor.dtype == those[name].dtype
                assert torch.equal(tensor, those[name]), name

    return check


@pytest.fixture(scope="session")
def in_child() -> Callable[..., int]:
    """Runs a function in a forked process of one thread; gives its exit code, or minus the signal that ended it.

    With `kill_after`, the process is killed (SIGKILL) after so many seconds. A function that raises ends with code 1.
    """

    def run(function: Callable[[], object], *, kill_after: float | None = None) -> int:
        process = os.fork()
        if process == 0:
            torch.set_num_threads(1)
            try:
                function()
                os._exit(0)
            except Exception as error:
                os.write(2, f"in the child: {type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(1)
        deadline = time.monotonic() + (120 if kill_after is None else kill_after)
        while True:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() >= deadline:
                os.kill(process, signal.SIGKILL)
                code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                assert kill_after is not None, "the child did not end"
                return code
            time.sleep(0.002)

    return run


def _free_port() -> int:
    """A port that no client gets by chance.

    Among those that the kernel hands to clients, a rank that asks before the first one listens can be given the very
    port that it asks for, and then talks to itself.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as held:
            try:
                held.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable[..., dict[int, str]]:
    """Runs `function(rank)` on so many forked processes with the environment that torchrun gives.

    Gives what each rank that failed said, by rank. All are ended after two minutes, or so many `seconds`, so that no
    test leaves one behind. `kill_after` says of ranks after how many seconds they are killed (SIGKILL), if they live.
    """
    # What DDP, FSDP and sharded checkpoints load at their first use, which is most of a tiny run's time: once, here.
    import torch._dynamo
    import torch.distributed.checkpoint.hf_storage
    import torch.distributed.fsdp
    import torch.distributed.nn.functional

    def run(
        size: int,
        function: Callable[[int], object],
        *,
        kill_after: Mapping[int, float] | None = None,
        seconds: float = 120,
    ) -> dict[int, str]:
        port = str(_free_port())
        said = Path(tempfile.mkdtemp(dir=tmp_path))

        def work(rank: int) -> None:
            torch.set_num_threads(1)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            where = (said / f"{rank}-hangs").open("w")
            faulthandler.dump_traceback_later(0.85 * seconds, file=where)
            try:
                function(rank)
            except Exception as error:
                (said / str(rank)).write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
            faulthandler.cancel_dump_traceback_later()

        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=work, args=(rank,)) for rank in range(size)]
        for process in processes:
            process.start()
        started = time.monotonic()
        deadline = started + seconds
        try:
            for rank, after in sorted((kill_after or {}).items(), key=lambda pair: pair[1]):
                time.sleep(max(0.0, started + after - time.monotonic()))
                processes[rank].kill()
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            hang = [rank for rank, process in enumerate(processes) if process.exitcode is None]
            words = [f"{path.name}: {path.read_text(encoding='utf-8')}" for path in sorted(said.iterdir())]
            assert not hang, "\n".join([f"ranks {hang} hang", *words])
        finally:
            for process in processes:
                process.kill()
        for rank, process in enumerate(processes):
            if process.exitcode:
                (said / str(rank)).write_text(f"exit code {process.exitcode}", encoding="utf-8")
        return {
            int(path.name): path.read_text(encoding="utf-8") for path in sorted(said.iterdir()) if path.name.isdigit()
        }

    return run
