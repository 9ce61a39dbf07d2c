"""The page of a coordinate check: whole, self-contained, escaped, and as cautious as its results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from entasis.errors import EntasisError
from entasis.report.coordinates import render_coordinates, size_figure, slope_words, write_coordinates
from entasis.report.scaling_schema import COORDINATES_FORMAT, Coordinates, Quantity, Rung
from entasis.shape.records import LayerShape, Shape
from entasis.study.slopes import slope

_WIDTHS = [32, 64, 128]
_SEEDS, _STEPS = 3, 2


def _quantity(name: str, exponent: float, layer: int | None, *, shown: bool = True) -> Quantity:
    growth = [[1 + 0.01 * seed + 0.2 * step for step in range(_STEPS + 1)] for seed in range(_SEEDS)]
    sizes = [[[0.1 * width**exponent * factor for factor in seed] for seed in growth] for width in _WIDTHS]
    changes = [[[value - seed[0] for value in seed[1:]] for seed in rung] for rung in sizes]
    last = [[seed[-1] for seed in rung] for rung in sizes]
    return Quantity(
        name=name,
        kind="mlp" if layer else "logits",
        layer=layer,
        shown=shown,
        widths=_WIDTHS,
        sizes=sizes,
        changes=changes,
        start=slope(_WIDTHS, last, 0.1),
        end=slope(_WIDTHS, last, 0.1),
        change=slope(_WIDTHS, last, 0.1),
    )


def _results(**changes: Any) -> Coordinates:
    shape = Shape((LayerShape(32, 2, 2, head_dim=16, mlp_hidden=64), LayerShape(16, 2, 2, 8, 64)), embed_width=32)
    results = Coordinates(
        format=COORDINATES_FORMAT,
        created="2026-11-29T12:00:00+00:00",
        command="entasis coordinates c.yaml",
        config={"model": {"initialisation": "mup"}, "optimizer": {"name": "adamw"}},
        environment={"torch": "2.13", "packages": {"numpy": "2"}},
        data="web-bible",
        data_fingerprint="abc",
        family="bowtie",
        rungs=[
            Rung(width=w, shape=shape.to_dict(), parameters=1000 * w, logit_divisor=w / 32, block_rate=32 / w)
            for w in _WIDTHS
        ],
        base_width=32,
        seeds=list(range(_SEEDS)),
        steps=_STEPS,
        learning_rate=0.01,
        probe_tokens=1024,
        tolerance=0.1,
        quantities=[
            _quantity("MLP 1", 0.0, 1),
            _quantity("MLP 2", 0.75, 2, shown=False),
            _quantity("logits", -0.5, None),
        ],
        summary=["change after the last step, of 3 quantities: 1 flat"],
    )
    results.update(changes)  # type: ignore[typeddict-item]
    return results


def test_a_page_needs_nothing_else_and_says_every_slope() -> None:
    page = render_coordinates(_results())
    assert not re.search(r"https?://|<script|<img|<link|@import", page)
    assert page.count('role="img"') == 2, "one figure of each shown quantity"
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    for words in (
        "Change after the last step, of 3 quantities: 1 flat.",
        "Slope of size at the start 0.00, flat within ±0.1",
        "hold at width 32; elsewhere the divisor grows",
        "MLP 2",
        "+0.75 grows",
        "−0.50 shrinks",
        "16–32",
        "adamw at 1e-2, constant",
    ):
        assert words in text, words
    assert "None" not in text and "{{" not in page


def test_untied_multipliers_are_named() -> None:
    assert "are the same at every width" in render_coordinates(_results(base_width=None))


def test_figures_hold_theme_colours_and_text_only() -> None:
    svg = size_figure(_quantity("MLP 1", 0.3, 1), _STEPS)
    assert not re.search(r"#[0-9a-f]{6}\b|rgb\(|DejaVu|<style|<metadata", svg)
    assert "var(--series-0)" in svg and "var(--series-1)" in svg
    for tick in (">32<", ">64<", ">128<", ">size<", ">change<"):
        assert tick in svg


def test_a_quantity_that_is_zero_or_of_one_seed_is_drawn() -> None:
    zero = _quantity("MLP 1", 0.0, 1)
    zero["changes"] = [[[0.0] * _STEPS] * _SEEDS for _ in _WIDTHS]
    zero["change"] = slope(_WIDTHS, [[0.0]] * 3, 0.1)
    assert ">zero<" in size_figure(zero, _STEPS)
    single = slope(_WIDTHS, [[1.0], [2.0], [4.0]], 0.1)
    assert slope_words(single, 0.1) == "+1.00, one seed"
    zero["start"] = single
    page = render_coordinates(_results(quantities=[zero]))
    assert "no slope" in page and "None" not in page


def test_equal_results_give_equal_bytes_and_names_cannot_break_out(tmp_path: Path) -> None:
    results = _results(data="<script>x</script>", command="entasis '<b>'")
    write_coordinates(results, tmp_path / "a.html")
    write_coordinates(results, tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert "<script" not in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_another_format_is_refused() -> None:
    with pytest.raises(EntasisError, match="entasis-comparison-1"):
        render_coordinates(_results(format="entasis-comparison-1"))
