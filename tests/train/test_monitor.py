"""What is measured and shown: throughput, utilisation, metrics."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from entasis.run.folder import RunFolder
from entasis.train.memory import count_peak_from_here, peak_bytes
from entasis.train.monitor import Monitor, Throughput
from entasis.train.peaks import peak_flops


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_throughput_with_a_clock_that_we_move() -> None:
    clock = Clock()
    throughput = Throughput(999_424, clock)
    clock.now += 5
    throughput.start()
    clock.now += 48.30
    assert throughput.stop() == pytest.approx(20_692.01, abs=0.01)
    clock.now += 1000  # an evaluation, a save
    throughput.start()
    clock.now += 0.5
    assert throughput.stop() == pytest.approx(1_998_848)
    throughput.start()
    assert throughput.stop() > 0, "a clock that stood still divides by nothing"


def test_a_step_of_the_loop_is_measured_without_evaluation_and_saving(tmp_path: Path) -> None:
    clock = Clock()
    throughput = Throughput(100, clock)
    rates = []
    for step in range(4):
        throughput.start()
        clock.now += 2
        rates.append(throughput.stop())
        clock.now += 100 * step
    assert rates == [50] * 4


@pytest.mark.parametrize(
    ("device", "bf16", "fp32"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4, 66.9),
        ("NVIDIA H100 PCIe", 756, 51),
        ("NVIDIA H100 NVL", 835, 60),
        ("NVIDIA H200", 989.4, 66.9),
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA A100-SXM4-40GB", 312, 19.5),
        ("NVIDIA A100-PCIE-40GB", 312, 19.5),
        ("NVIDIA A100 80GB PCIe", 312, 19.5),
        ("NVIDIA H800", 989.4, 66.9),
        ("NVIDIA H800 PCIe", 756, 51),
        ("NVIDIA L4", 121, 30.3),
        ("NVIDIA L40S", 362, 91.6),
        ("NVIDIA A10", 125, 31.2),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("NVIDIA GeForce RTX 3090", 71, 35.6),
        ("NVIDIA B200", 2250, 75),
    ],
)
def test_peaks_that_are_known(device: str, bf16: float, fp32: float) -> None:
    for dtype, tera, name in ((torch.bfloat16, bf16, "bf16"), (torch.float32, fp32, "fp32")):
        found = peak_flops(device, dtype)
        assert found is not None
        assert found[0] == pytest.approx(tera * 1e12)
        assert f"{name} {tera:g} TFLOP/s" in found[1]


@pytest.mark.parametrize(
    "device",
    [
        "",
        "x86_64",
        "arm",
        "Intel(R) Xeon(R) Platinum 8480+",
        "Tesla V100-SXM2-16GB",
        "NVIDIA A10G",
        "NVIDIA L40",
        "NVIDIA GH200 480GB",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "AMD Instinct MI300X",
    ],
)
def test_an_unknown_device_has_no_peak_rather_than_a_wrong_one(device: str) -> None:
    assert peak_flops(device, torch.bfloat16) is None


def _monitor(tmp_path: Path, peak: tuple[float, str] | None, *, terminal: bool) -> tuple[Monitor, io.StringIO]:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=160, color_system=None)
    monitor = Monitor(
        RunFolder(tmp_path), console, label="uniform", step=2, steps=10, flops_per_token=1_000_000, peak=peak
    )
    return monitor, shown


def _record(step: int, rate: float = 1000.0) -> dict[str, float | int]:
    return {"step": step, "tokens": step, "train_loss": 3.25, "tokens_per_second": rate}


def test_the_bar_shows_loss_rate_and_utilisation_with_its_peak(tmp_path: Path) -> None:
    monitor, shown = _monitor(tmp_path, (10e9, "H100 bf16 989.4 TFLOP/s"), terminal=True)
    with monitor:
        for step, rate in ((3, 1000.0), (4, 1000.0), (5, 90_000.0)):
            monitor.step(_record(step, rate))
        monitor.step({**_record(6), "val_loss": 3.5})
    last = shown.getvalue()
    # 3 × 1e6 FLOPs a token × 1,000 tokens/s (the median, whatever one step did) of 10e9.
    for part in (
        "uniform",
        "6/10",
        "loss 3.250",
        "held-out 3.500",
        "1,000 tokens/s",
        "MFU 30% of H100 bf16 989.4 TFLOP/s",
    ):
        assert part in last, part
    assert [record["step"] for record in RunFolder(tmp_path).read_metrics()] == [3, 4, 5, 6]
    assert "step 6: train loss 3.2500, held-out loss 3.5000" in RunFolder(tmp_path).log_file.read_text(encoding="utf-8")


def test_no_utilisation_without_a_peak_and_nothing_where_no_terminal_is(tmp_path: Path) -> None:
    monitor, shown = _monitor(tmp_path, None, terminal=True)
    with monitor:
        monitor.step(_record(3))
    assert "MFU" not in shown.getvalue()
    assert "1,000 tokens/s" in shown.getvalue()
    monitor, shown = _monitor(tmp_path, None, terminal=False)
    with monitor:
        monitor.step(_record(4))
    assert not shown.getvalue().strip()


def test_the_speed_of_a_run_in_a_line(tmp_path: Path) -> None:
    for peak, memory, line in (
        (None, None, "1,000 tokens/s"),
        (None, 3 << 29, "1,000 tokens/s, 1.50 GiB at most"),
        ((10e9, "H100"), 3 << 29, "1,000 tokens/s, MFU 30% of H100, 1.50 GiB at most"),
    ):
        monitor, _ = _monitor(tmp_path, peak, terminal=False)
        with monitor:
            monitor.step(_record(3))
        assert monitor.speed(memory) == line


def test_peak_memory_is_counted_from_the_start_of_a_run_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, torch.device]] = []

    def read(device: torch.device) -> int:
        asked.append(("read", device))
        return 7

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: asked.append(("reset", device)))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", read)
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    count_peak_from_here(cpu)
    assert (peak_bytes(cpu), asked) == (None, [])
    count_peak_from_here(cuda)
    assert (peak_bytes(cuda), asked) == (7, [("reset", cuda), ("read", cuda)])
