"""`benchmarks/gpu_smoke.sh`, as far as it goes without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_smoke.sh"


def _run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    place = {"PYTHON": sys.executable, "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([SCRIPT, *arguments], env=os.environ | place, capture_output=True, text=True, check=False)
    assert not list(tmp_path.glob("gpu-smoke*")), "its folder is removed"
    return done


@pytest.mark.slow
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    done = _run(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gpu_smoke: there is no CUDA GPU here; --tiny tries the same on the CPU\n"


@pytest.mark.slow
def test_tiny_models_on_the_cpu(tmp_path: Path) -> None:
    done = _run(tmp_path, "--tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    _, header, *lines, seconds = done.stdout.splitlines()
    assert header.split()[:5] == ["model", "parameters", "tokens/s", "MFU", "peak"]
    assert [line.split()[:2] for line in lines] == [["tiny", name] for name in ("uniform", "prism", "bowtie")]
    for line in lines:
        assert re.fullmatch(r"tiny \w+ +[\d,]+ +[\d,]+ +- +-  the same", line), line
    assert re.fullmatch(r"in \d+ s", seconds)


@pytest.mark.slow
def test_a_model_that_there_is_not(tmp_path: Path) -> None:
    done = _run(tmp_path, "--tiny", "--only", "nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gpu_smoke: --only nonsense: no model is called so\n"
