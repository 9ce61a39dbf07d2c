"""Resident memory while tokens are streamed does not grow with the file."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from entasis.data.foreign import open_foreign
from entasis.data.stream import BatchStream, held_out_batches

CONTEXT = 8192
SEQUENCES = 16


def resident_bytes() -> int:
    """`VmRSS` of this process."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found.group(1)) * 1024


def sparse(path: Path, size: int) -> Path:
    """A file that takes no room on the disk: all its tokens are 0."""
    path.touch()
    os.truncate(path, size)
    return path


def growth(path: Path, share: float) -> int:
    """By how much resident memory grew at most while so much of a file was streamed in training order."""
    data = open_foreign("nanogpt", str(path), vocab_size=50_257)
    stream = BatchStream(data.train, context=CONTEXT, batch_sequences=SEQUENCES, seed=0, eos_id=None)
    steps = int(share * stream.windows_per_epoch / SEQUENCES)
    stream.batch(0)
    before = most = resident_bytes()
    for step in range(steps):
        assert stream.batch(step).tokens.shape == (SEQUENCES, CONTEXT)
        most = max(most, resident_bytes())
    held_out = held_out_batches(
        data.held_out, context=CONTEXT, batch_sequences=SEQUENCES, tokens=1 << 22, document_mask=False, eos_id=None
    )
    for _ in held_out:
        most = max(most, resident_bytes())
    return most - before


def test_streaming_a_large_file_takes_no_more_memory_than_a_batch(tmp_path: Path) -> None:
    assert growth(sparse(tmp_path / "train.bin", 1 << 30), 0.15) < 40e6


def test_a_memory_map_of_the_file_would_be_seen(tmp_path: Path) -> None:
    """The measure can fail: the same reading through a map that stays open."""
    mapped = np.memmap(sparse(tmp_path / "train.bin", 1 << 28), np.uint16, "r")
    before = resident_bytes()
    for start in range(0, len(mapped) // 2, CONTEXT):
        mapped[start : start + CONTEXT].astype(np.int64)
    assert resident_bytes() - before > 100e6


@pytest.mark.slow
def test_streaming_four_gigabytes_stays_far_below_300_megabytes(tmp_path: Path) -> None:
    assert growth(sparse(tmp_path / "train.bin", 4 << 30), 1.0) < 100e6
