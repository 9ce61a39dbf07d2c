"""Where and in what precision a model computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entasis.errors import ConfigError
from entasis.model.device import Computation, choose_computation


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


def _bf16_in_hardware(monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool]) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)


def test_auto_takes_the_cpu_where_nothing_else_is() -> None:
    assert choose_computation("auto", "fp32").device == torch.device("cpu")
    assert choose_computation("cpu", "fp32").device == torch.device("cpu")


@pytest.mark.parametrize("name", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^train\.device: {name} is not available here; available: cpu$"):
        choose_computation(name)  # type: ignore[arg-type]


def test_auto_prefers_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_computation("auto") == Computation(torch.device("mps"), torch.float32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for supported, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, s=supported: s)
        assert choose_computation("auto") == Computation(torch.device("cuda"), dtype)


def test_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    for capabilities, expected in (
        ({"avx512_bf16": True}, "bf16"),
        ({"amx_bf16": True}, "bf16"),
        ({"avx512_bf16": False, "avx2": True}, "fp32"),
        ({}, "fp32"),
    ):
        _bf16_in_hardware(monkeypatch, capabilities)
        assert choose_computation("cpu", "auto").precision == expected
        assert choose_computation("cpu", "fp32").precision == "fp32"
        assert choose_computation("cpu", "bf16").precision == "bf16"


def test_threads_are_set_only_where_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    choose_computation("cpu", "fp32", "auto")
    assert seen == []
    choose_computation("cpu", "fp32", 3)
    assert seen == [3]


def test_products_run_in_the_chosen_precision_and_weights_stay_float32() -> None:
    left, right = torch.ones(2, 2), torch.ones(2, 2)
    with choose_computation("cpu", "bf16").autocast():
        assert (left @ right).dtype == torch.bfloat16
    with choose_computation("cpu", "fp32").autocast():
        assert (left @ right).dtype == torch.float32
    assert left.dtype == torch.float32


def test_arrays_become_tensors_of_the_same_numbers() -> None:
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    tensor = choose_computation("cpu").tensor(array)
    assert tensor.dtype == torch.int64
    assert tensor.tolist() == array.tolist()
