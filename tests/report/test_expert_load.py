"""The load of experts in a comparison's report: drawn, in words, and only where there are experts."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape

import pytest

from entasis.report.comparison import render_report
from entasis.report.experts import expert_map
from entasis.report.schema import Comparison, ExpertLoad

BuildComparison = Callable[..., Comparison]


def _text(page: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", page)))


def test_only_shapes_with_experts_have_a_map(build: BuildComparison) -> None:
    assert 'id="experts"' not in render_report(build())
    results = build(experts=("bowtie",))
    assert expert_map(results["shapes"]["prism"]["runs"]) is None
    page = render_report(results)
    section = page[page.index('id="experts"') : page.index('id="samples"')]
    assert section.count('<svg class="experts"') == 1
    assert section.count('class="cell"') == 2 * 6 + 3, "two layers of six experts, and the scale"
    assert 'aria-label="bowtie: load of the experts of layers 3, 6"' in section
    assert "var(--series-2)" in section, "the shape's own colour, in both themes"
    assert not re.search(r"#[0-9a-f]{6}\b", section)
    assert "prism" not in section


def test_loads_are_multiples_of_an_even_share_from_bottom_to_top(build: BuildComparison) -> None:
    runs = build(experts=("bowtie",))["shapes"]["bowtie"]["runs"]
    runs[0]["expert_load"] = [
        ExpertLoad(layer=2, shares=[0.25, 0.25, 0.25, 0.25]),
        ExpertLoad(layer=5, shares=[0.0, 0.1, 0.15, 0.75]),
    ]
    made = expert_map(runs[:1])
    assert made is not None
    assert [row.layer for row in made.rows] == [2, 5]
    assert float(made.rows[0].y) > float(made.rows[1].y)
    assert [cell.opacity for cell in made.rows[0].cells] == ["0.333"] * 4, "3 times even has the full colour"
    assert [cell.opacity for cell in made.rows[1].cells] == ["0.000", "0.133", "0.200", "1.000"]
    assert made.rows[1].cells[3].title == "layer 5, expert 4: 3.00×"
    assert made.scale[1:] == [("even", "0.333"), ("3.00×", "1")]
    assert made.words == (
        "the most used is expert 4 of layer 5, seed 0, with 3.00× an even share; the least used is expert 1 of layer "
        "5, seed 0, with 0×. 1 of 8 experts, over layers and seeds, got no token."
    )
    row = made.extremes[1]
    assert (row.least, row.least_load, row.most, row.most_load) == (1, "0×", 4, "3.00×")


def test_an_even_load_has_half_the_colour_and_says_so(build: BuildComparison) -> None:
    runs = build(experts=("bowtie",))["shapes"]["bowtie"]["runs"]
    runs[0]["expert_load"] = [ExpertLoad(layer=1, shares=[0.5, 0.5])]
    made = expert_map(runs[:1])
    assert made is not None
    assert [cell.opacity for cell in made.rows[0].cells] == ["0.500", "0.500"]


@pytest.mark.parametrize("experts", [2, 22, 128])
def test_a_map_fits_a_phone(build: BuildComparison, experts: int) -> None:
    runs = build(experts=("bowtie",))["shapes"]["bowtie"]["runs"]
    runs[0]["expert_load"] = [ExpertLoad(layer=n, shares=[1 / experts] * experts) for n in range(1, 41)]
    made = expert_map(runs[:1])
    assert made is not None
    assert float(made.rows[0].cells[-1].x) + float(made.cell_width) <= 360.001
    assert float(made.height) <= 40 * 9.0


def test_words_name_all_seeds_and_results_without_the_field_are_drawn(build: BuildComparison) -> None:
    results = build(experts=("uniform", "bowtie"))
    text = _text(render_report(results))
    every = [
        (share * 6, run["seed"], layer["layer"], number)
        for run in results["shapes"]["bowtie"]["runs"]
        for layer in run["expert_load"]
        for number, share in enumerate(layer["shares"], start=1)
    ]
    _, seed, layer, number = max(every)
    assert f"bowtie: the most used is expert {number} of layer {layer}, seed {seed}" in text
    for shape in results["shapes"].values():
        for run in shape["runs"]:
            del run["expert_load"]  # type: ignore[misc]
    assert 'id="experts"' not in render_report(results)
