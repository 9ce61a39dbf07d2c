"""The parts of a report: figures in theme colours, silhouettes to scale, numbers in words."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from entasis.report import numbers
from entasis.report.figures import difference_figure, forest_figure, learning_rate_figure, loss_figure
from entasis.report.ink import Pen, finish
from entasis.report.schema import Comparison
from entasis.report.series import Series, difference_band, loss_band
from entasis.report.silhouette import VIEW_WIDTH, silhouettes
from entasis.shape.records import LayerShape, Shape

BuildComparison = Callable[..., Comparison]


def series_of(results: Comparison) -> list[Series]:
    return [Series(name, Pen(index), shape) for index, (name, shape) in enumerate(results["shapes"].items())]


def test_figures_hold_text_and_theme_colours_only(build: BuildComparison) -> None:
    shapes = series_of(build(tuned=True))
    figures = [
        loss_figure(shapes, 300),
        difference_figure(shapes[1:], shapes[0], 300),
        learning_rate_figure(shapes),
        forest_figure(shapes[1:]),
    ]
    for svg in figures:
        assert svg.startswith('<svg viewBox="0 0 ')
        assert 'role="img"' in svg
        assert not re.search(r"#[0-9a-f]{6}\b|rgb\(|DejaVu|<style|<metadata|: (?:black|white)", svg)
        assert "var(--series-1)" in svg
        assert "<text" in svg
    assert ">prism<" in figures[3]
    assert ">bowtie<" in figures[3]


def test_figures_do_not_depend_on_the_users_matplotlib_style(build: BuildComparison) -> None:
    import matplotlib as mpl

    shapes = series_of(build())
    plain = loss_figure(shapes, 300)
    with mpl.rc_context({"font.size": 30, "axes.grid": True, "lines.linewidth": 9, "svg.fonttype": "path"}):
        assert loss_figure(shapes, 300) == plain


def test_a_figure_in_a_colour_of_no_theme_is_refused() -> None:
    with pytest.raises(ValueError, match="#123456 is in no theme"):
        finish('<svg viewBox="0 0 1 1"><path style="fill: #123456"/></svg>', label="x", names={})


def test_placeholders_are_replaced_once(build: BuildComparison) -> None:
    svg = '<svg viewBox="0 0 1 1"><text>a-0-</text><text>a-1-</text></svg>'
    assert "<text>a-1-</text><text>&lt;x&gt;</text>" in finish(svg, label="x", names={"a-0-": "a-1-", "a-1-": "<x>"})


def test_bands_pair_by_seed_not_by_position(build: BuildComparison) -> None:
    results = build(families=("uniform", "bowtie"))
    reference, bowtie = series_of(results)
    expected = difference_band(bowtie, reference)
    bowtie.result["runs"].reverse()
    shuffled = difference_band(bowtie, reference)
    assert shuffled.steps == expected.steps
    assert shuffled.mean == pytest.approx(expected.mean, abs=1e-12)
    assert (shuffled.low, shuffled.high) == (expected.low, expected.high)
    difference = results["shapes"]["bowtie"]["difference"]
    assert difference is not None
    assert expected.mean[-1] == pytest.approx(difference["mean"], abs=1e-12)
    band = loss_band(reference)
    assert all(low <= mean <= high for low, mean, high in zip(band.low, band.mean, band.high, strict=True))


def test_silhouettes_share_one_scale_and_show_heads() -> None:
    wide = Shape((_layer(64, 4), _layer(32, 1), _layer(64, 0)), embed_width=64)
    narrow = Shape((_layer(16, 2),), embed_width=16, unembed_width=32)
    first, second = silhouettes([wide, narrow])
    assert [float(bar.width) for bar in first.bars] == [VIEW_WIDTH - 4, (VIEW_WIDTH - 4) / 2, VIEW_WIDTH - 4]
    assert float(second.bars[0].width) == (VIEW_WIDTH - 4) / 4
    assert float(second.head.width) == 2 * float(second.embed.width)
    assert [bar.gaps.count("M") for bar in first.bars] == [3, 0, 0]
    assert [bar.attention for bar in first.bars] == [True, True, False]
    heights = [float(bar.y) for bar in first.bars]
    assert heights == sorted(heights, reverse=True)  # the first layer is at the bottom
    assert first.bar_height == second.bar_height
    assert "no attention" in first.bars[2].title


def test_many_narrow_heads_do_not_erase_a_bar() -> None:
    (drawing,) = silhouettes([Shape((_layer(1024, 8), _layer(32, 16)), embed_width=1024)])
    assert drawing.bars[0].gaps
    assert drawing.bars[1].gaps == ""


def test_equal_neighbours_share_a_row() -> None:
    (drawing,) = silhouettes([Shape((*[_layer(32, 2)] * 3, _layer(16, 1), _layer(32, 2)), embed_width=32)])
    assert [group.layers for group in drawing.groups] == ["1–3", "4", "5"]
    assert (drawing.widths, drawing.heads) == ("16–32", "1–2")


def _layer(width: int, heads: int) -> LayerShape:
    return LayerShape(width, heads, heads, head_dim=width // max(heads, 1), mlp_hidden=4 * width)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (numbers.nats(-0.01234, sign=True), "−0.0123"),
        (numbers.nats(0.000012345, sign=True), "+0.000012"),
        (numbers.nats(0.0), "0.0000"),
        (numbers.nats(2.5), "2.5000"),
        (numbers.interval(-0.00024, 0.0076), "−0.0002 to +0.0076"),
        (numbers.interval(-0.0000031, 0.0076), "−0.000003 to +0.007600"),
        (numbers.count(10_485_760), "10.49 M"),
        (numbers.count(999), "999"),
        (numbers.count(2.1e13, "FLOP"), "21.00 TFLOP"),
        (numbers.binary_bytes(8192), "8.000 KiB"),
        (numbers.binary_bytes(512), "512 bytes"),
        (numbers.ratio(None), "–"),
        (numbers.ratio(0.96123), "0.961×"),
        (numbers.ratio(123.4), "123×"),
        (numbers.percent(0.01), "1 %"),
        (numbers.rate(3e-3), "3e-3"),
        (numbers.rate(0.00015), "1.5e-4"),
        (numbers.significant(0.2926, 3), "0.293"),
        (numbers.significant(1234.5, 3), "1,234"),
    ],
)
def test_numbers_in_words(text: str, expected: str) -> None:
    assert text == expected
