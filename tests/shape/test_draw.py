"""What a person sees in the terminal."""

from __future__ import annotations

import re

from entasis.shape.budget import budget
from entasis.shape.draw import budget_table, findings_text, silhouette
from entasis.shape.families import bowtie, prism, uniform
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape
from entasis.shape.rules import Finding

BAR = re.compile(r"[█▓░]+")


def bars(text: str) -> list[str]:
    return BAR.findall(text)


def test_one_line_a_layer_with_its_numbers() -> None:
    shape = bowtie(layers=16, width=640, heads=16, kv_heads=4)
    lines = silhouette(shape).splitlines()
    assert len(lines) == 1 + 16 + 1
    assert lines[0].split() == ["layer", "width", "heads", "mlp"]
    for number, (line, layer) in enumerate(zip(lines[1:-1], shape.layers, strict=True), start=1):
        assert line.split()[:4] == [str(number), str(layer.width), f"16/4×{layer.head_dim}", str(layer.mlp_hidden)]
        assert len(line) <= 100
    assert lines[-1].strip() == "embedding and head: 640 wide"


def test_bars_are_as_wide_as_layers_and_centred() -> None:
    shape = bowtie(layers=16, width=640, heads=16)
    text = silhouette(shape, columns=100)
    lengths = [len(bar) for bar in bars(text)]
    room = max(lengths)
    widest = max(layer.width for layer in shape.layers)
    assert lengths == [round(room * layer.width / widest) for layer in shape.layers]
    first = text.splitlines()[1].index("█")
    for line in text.splitlines()[1:-1]:
        bar = BAR.search(line)
        assert bar is not None
        left, right = bar.start() - first, first + room - bar.end()
        assert abs(left - right) <= 1


def test_bars_are_cut_into_heads() -> None:
    shape = prism(width=768, heads=[3] * 3 + [6] * 3 + [12] * 6)
    for bar, layer in zip(bars(silhouette(shape)), shape.layers, strict=True):
        assert len(re.findall(r"█+|▓+", bar)) == layer.heads


def test_what_a_layer_has_beside_gets_a_column() -> None:
    layers = (
        LayerShape(64, 4, 2, 16, 256, value_dim=24, window=128),
        LayerShape(64, 4, 4, 16, 32, experts=8, experts_per_token=2),
        LayerShape(64, 0, 0, 0, 0),
    )
    lines = silhouette(Shape(layers, 64), columns=80).splitlines()
    assert lines[0].split() == ["layer", "width", "heads", "mlp", "values", "window", "experts"]
    assert lines[1].split()[:7] == ["1", "64", "4/2×16", "256", "2×24", "128", "–"]
    assert lines[2].split()[:9] == ["2", "64", "4×16", "32", "–", "–", "2", "of", "8"]
    assert lines[3].split()[:7] == ["3", "64", "none", "none", "–", "–", "–"]
    assert all(len(line) <= 80 for line in lines)
    alone = Shape((LayerShape(64, 4, 4, 16, 256, window=128),), 64)
    assert silhouette(alone).splitlines()[0].split() == ["layer", "width", "heads", "mlp", "window"]


def test_layers_without_attention_and_tiny_ones_are_drawn_too() -> None:
    shape = Shape((LayerShape(4096, 0, 0, 0, 64), LayerShape(1, 1, 1, 2, 0)), 4096, 2048)
    lines = silhouette(shape, columns=20).splitlines()
    assert lines[1].split()[2] == "none"
    assert set(bars(lines[1])[0]) == {"░"}
    assert bars(lines[2]) == ["█"]
    assert lines[3].strip() == "embedding: 4096 wide, head: 2048 wide"


def test_the_table_shows_every_cost_beside_the_straight_column() -> None:
    config = ModelConfig(50_257, 1024)
    mine = budget(bowtie(layers=16, width=640, heads=16), config)
    straight = budget(uniform(layers=16, width=640, heads=16), config)
    table = budget_table(mine, straight)
    assert table.splitlines()[0].split() == ["at", "1,024", "tokens", "of", "context", "this", "uniform", "ratio"]
    for name, value in mine.to_dict().items():
        if name != "context":
            assert f"{value:,}" in table
            assert f"{straight.to_dict()[name]:,}" in table
            assert f"{value / straight.to_dict()[name]:.4f}" in table
    assert len({len(line) for line in table.splitlines()}) == 1


def test_no_ratio_to_nothing() -> None:
    config = ModelConfig(97, 16)
    without = budget(Shape((LayerShape(16, 0, 0, 0, 64),), 16), config)
    line = next(line for line in budget_table(without, without).splitlines() if line.startswith("KV cache"))
    assert line.split()[-1] == "–"


def test_layers_of_which_the_same_is_said_stand_together() -> None:
    found = [Finding("error", 4, "bad")]
    found += [Finding("warning", layer, "odd") for layer in (1, 2, 3, 7)]
    found += [Finding("warning", None, "large"), Finding("warning", 7, "bad")]
    assert findings_text(found).splitlines() == [
        "error: layer 4: bad",
        "warning: layers 1-3, 7: odd",
        "warning: large",
        "warning: layer 7: bad",
    ]
    assert findings_text([]) == ""
