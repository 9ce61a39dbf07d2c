"""Rotary angles: exact, distinct at every position in every precision, one table per head dim."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from entasis.model import attention
from entasis.model.rotary import Rotation, rotate, rotation
from entasis.model.transformer import Transformer
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape, Shape

TIME = 2048


def small_model(*head_dims: int) -> Transformer:
    layers = tuple(LayerShape(width=16, heads=1, kv_heads=1, head_dim=dim, mlp_hidden=8) for dim in head_dims)
    return Transformer(Shape(layers, embed_width=16), ModelConfig(vocab_size=97, context=TIME))


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Rotation]:
    """The rotations that reach attention, in order."""
    seen: list[Rotation] = []

    def spy(x: Tensor, by: Rotation) -> Tensor:
        seen.append(by)
        return rotate(x, by)

    monkeypatch.setattr(attention, "rotate", spy)
    return seen


@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16", "float64"])
def test_positions_stay_distinct_and_exact_to_2048(precision: str, used: list[Rotation]) -> None:
    model = small_model(8)
    if precision in ("bfloat16", "float64"):
        model = model.to(getattr(torch, precision))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        model(torch.zeros(1, TIME, dtype=torch.int64))
    [by] = used
    cos, sin = by.cos.reshape(TIME, 4), by.sin.reshape(TIME, 4)
    assert cos.dtype == (torch.float64 if precision == "float64" else torch.float32)
    assert len({tuple(row) for row in torch.cat([cos, sin], dim=1).tolist()}) == TIME
    position = torch.arange(TIME, dtype=torch.float64)[:, None]
    angles = position / 10_000.0 ** torch.tensor([0, 0.25, 0.5, 0.75], dtype=torch.float64)
    tolerance = 1e-12 if precision == "float64" else 5e-4
    torch.testing.assert_close(cos.double(), angles.cos(), rtol=0, atol=tolerance)
    torch.testing.assert_close(sin.double(), angles.sin(), rtol=0, atol=tolerance)


def test_values_are_rounded_only_after_the_turn() -> None:
    x = torch.randn(1, TIME, 2, 8).bfloat16()
    by = rotation(torch.arange(TIME)[None], 8, 10_000.0, torch.bfloat16)
    turned = rotate(x, by)
    assert turned.dtype == torch.float32
    torch.testing.assert_close(turned.norm(dim=-1), x.float().norm(dim=-1), rtol=1e-5, atol=1e-5)


def test_scores_depend_on_distance_alone() -> None:
    query, key = torch.randn(2, 1, 1, 1, 6, dtype=torch.float64)

    def score(at: int, distance: int) -> float:
        positions = torch.tensor([[at + distance], [at]])
        turned = [
            rotate(x, rotation(p[None], 6, 100.0, torch.float64)) for x, p in zip((query, key), positions, strict=True)
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(3, 5) == pytest.approx(score(900, 5), abs=1e-10)
    assert score(3, 5) != pytest.approx(score(3, 6), abs=1e-4)


def test_one_table_per_head_dim_and_none_is_stored(used: list[Rotation]) -> None:
    model = small_model(8, 16, 8)
    model(torch.zeros(1, 5, dtype=torch.int64))
    assert [by.cos.shape[-1] for by in used] == [4, 8, 4]
    assert used[0].cos is used[2].cos
    assert not list(model.buffers())
