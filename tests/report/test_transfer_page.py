"""The page of a transfer check: whole, self-contained, escaped, and as cautious as its results."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from entasis.errors import EntasisError
from entasis.report.scaling_schema import TRANSFER_FORMAT, Rung, Transfer, TransferFamily
from entasis.report.transfer import rate_figure, render_transfer, write_transfer
from entasis.study.grids import move, tuned_rung

_RATES = [1e-3, 2e-3, 4e-3, 8e-3]


def _family(name: str, *, diverges: bool = False, seeds: int = 3) -> TransferFamily:
    rungs = []
    for index, width in enumerate((32, 64, 128)):
        losses: dict[float, list[float | None]] = {
            value: [
                3.0 - 0.1 * index + 0.05 * abs(place - 1 - index // 2) + 0.001 * seed * place for seed in range(seeds)
            ]
            for place, value in enumerate(_RATES)
        }
        if diverges:
            losses[_RATES[-1]][0] = None
        rung = Rung(width=width, shape={}, parameters=1000 * width, logit_divisor=width / 4, block_rate=4 / width)
        rungs.append(tuned_rung(name, rung, losses, 4.0))
    moves = [move(name, smaller, larger) for smaller, larger in pairwise(rungs)]
    return TransferFamily(settings={"family": name}, rungs=rungs, moves=moves)


def _results(**changes: Any) -> Transfer:
    results = Transfer(
        format=TRANSFER_FORMAT,
        created="2026-11-29T12:00:00+00:00",
        command="entasis transfer c.yaml",
        config={"model": {"initialisation": "mup"}},
        environment={"torch": "2.13"},
        data="some text",
        data_fingerprint="abc",
        widths=[32, 64, 128],
        base_width=None,
        learning_rates=_RATES,
        seeds=[0, 1, 2],
        steps=100,
        batch_tokens=1024,
        families={"uniform": _family("uniform"), "bowtie": _family("bowtie", diverges=True)},
    )
    results.update(changes)  # type: ignore[typeddict-item]
    return results


def test_a_page_needs_nothing_else_and_says_every_verdict() -> None:
    results = _results()
    page = render_transfer(results)
    assert not re.search(r"https?://|<script|<img|<link|@import", page)
    assert page.count('role="img"') == 2
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page)).replace("\N{NO-BREAK SPACE}", " ")
    for family in results["families"].values():
        for each in family["moves"]:
            assert each["sentence"] in text
            assert f"{each['verdict'][0].upper()}{each['verdict'][1:]}." in text
    for words in ("width 64", "bowtie, 128", "diverged", "are the same at every width", "100 steps of 1,024 tokens"):
        assert words in text, words
    assert "None" not in text and "{{" not in page


def test_one_seed_has_no_bands_and_no_interval() -> None:
    page = render_transfer(_results(seeds=[0], families={"uniform": _family("uniform", seeds=1)}, base_width=64))
    assert "bands run" not in page
    assert "hold at width 64" in page
    assert "None" not in re.sub(r"<[^>]+>", " ", page)


def test_figures_hold_theme_colours_and_text_only() -> None:
    svg = rate_figure(0, _family("bowtie", diverges=True))
    assert not re.search(r"#[0-9a-f]{6}\b|rgb\(|DejaVu|<style|<metadata", svg)
    for piece in ("var(--series-0)", "var(--series-1)", "var(--series-2)", ">1e-3<", ">8e-3<", ">learning rate<"):
        assert piece in svg, piece


def test_equal_results_give_equal_bytes_and_names_cannot_break_out(tmp_path: Path) -> None:
    results = _results(data="<script>x</script>", families={"<b>x</b>": _family("<i>")})
    write_transfer(results, tmp_path / "a.html")
    write_transfer(results, tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert not re.search(r"<script|<b>|<i>", page)


def test_another_format_is_refused() -> None:
    with pytest.raises(EntasisError, match="entasis-comparison-1"):
        render_transfer(_results(format="entasis-comparison-1"))
