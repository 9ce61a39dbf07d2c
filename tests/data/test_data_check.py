"""`check_prepared`: every damage is found, named with file and offset, and all of them are listed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from entasis.data.check import Finding, check_prepared
from entasis.data.dataset import TokenData
from entasis.data.flat import file_sha256
from entasis.errors import EntasisError

Prepare = Callable[..., TokenData]


def found(folder: Path) -> list[Finding]:
    return list(check_prepared(folder))


def trust(folder: Path, file: str) -> None:
    """Puts a changed file's checksum into the manifest, as a program that writes wrong data would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for split in (manifest["train"], manifest["held_out"]):
        for record in (*split["shards"], split["documents"]):
            if record["file"] == file:
                record["sha256"] = file_sha256(folder / file)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_sound_data_has_no_findings(prepare: Prepare) -> None:
    assert not found(prepare().path)


@pytest.mark.parametrize("file", ["train-00001.npy", "held-out-00000.npy", "train-documents.npy"])
def test_a_flipped_bit_anywhere_is_found(prepare: Prepare, file: str) -> None:
    folder = prepare().path
    whole = (folder / file).read_bytes()
    for place in (100, 130, len(whole) - 1):
        (folder / file).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        findings = found(folder)
        assert findings and all(finding.file.name == file for finding in findings), place
    (folder / file).write_bytes(whole)
    assert not found(folder)


def test_all_damage_is_listed_at_once(prepare: Prepare) -> None:
    folder = prepare().path
    shard = np.load(folder / "train-00000.npy")
    shard[[7, 11]] = 300, 301
    np.save(folder / "train-00000.npy", shard)
    os.truncate(folder / "train-00002.npy", 900)
    (folder / "held-out-00000.npy").unlink()
    (folder / "tokenizer" / "entasis-tokenizer.json").write_text("{}")
    findings = found(folder)
    assert [finding.file.name for finding in findings] == [
        "train-00000.npy",
        "train-00000.npy",
        "train-00002.npy",
        "held-out-00000.npy",
        "tokenizer",
    ]
    first = findings[0]
    assert (first.offset, first.byte) == (7, 128 + 14)
    assert "train-00000.npy: token 7 is 300, outside the vocabulary of 257" in first.line
    assert "2 such ids in all" in first.line
    assert "checksum" in findings[1].line
    assert "900 bytes long instead of" in findings[2].line
    assert all("\n" not in finding.line for finding in findings)


@pytest.mark.parametrize(("entry", "value"), [(0, 1), (3, 2), (5, 10**9)])
def test_starts_that_do_not_ascend_are_found(prepare: Prepare, entry: int, value: int) -> None:
    folder = prepare().path
    starts = np.load(folder / "train-documents.npy")
    starts[entry] = value
    np.save(folder / "train-documents.npy", starts)
    findings = found(folder)
    assert (findings[0].file.name, findings[0].offset) == ("train-documents.npy", entry)
    assert findings[0].byte == 128 + 8 * entry


def test_starts_without_an_end_before_them_are_found(prepare: Prepare) -> None:
    """The manifest agrees with both files, and only the end tokens tell."""
    data = prepare()
    starts = np.load(data.path / "train-documents.npy")
    starts[4] += 1
    np.save(data.path / "train-documents.npy", starts)
    trust(data.path, "train-documents.npy")
    manifest = json.loads((data.path / "manifest.json").read_text())
    manifest["fingerprint"] = data.manifest.model_validate(manifest).computed_fingerprint()
    (data.path / "manifest.json").write_text(json.dumps(manifest))
    (finding,) = found(data.path)
    wrong = int(starts[4]) - 1
    assert (finding.file.name, finding.offset) == (f"train-0000{wrong // 700}.npy", wrong % 700)
    assert "instead of the end token 256" in finding.line


def test_a_manifest_that_cannot_be_read_is_the_only_finding(prepare: Prepare) -> None:
    folder = prepare().path
    (folder / "manifest.json").write_text("{")
    (finding,) = found(folder)
    assert finding.file == folder / "manifest.json"


def test_links_out_of_the_folder_are_refused(prepare: Prepare, tmp_path: Path) -> None:
    folder = prepare().path
    shard = folder / "train-00000.npy"
    shard.rename(folder / "inside.npy")
    shard.symlink_to("inside.npy")
    TokenData.open(folder)
    (folder / "inside.npy").rename(tmp_path / "outside.npy")
    shard.unlink()
    for target in (tmp_path / "outside.npy", Path("..") / "outside.npy"):
        shard.symlink_to(target)
        with pytest.raises(EntasisError, match=r"train-00000\.npy: a link to .*outside\.npy, outside the folder"):
            TokenData.open(folder)
        assert "outside the folder" in found(folder)[0].line
        shard.unlink()
