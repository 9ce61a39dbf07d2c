"""Self-attention of one layer, with that layer's own heads, head dims and key/value heads."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from entasis.model.norm import Norm
from entasis.model.projection import Projection
from entasis.model.rotary import Rotation, rotate
from entasis.model.window import Mask, WindowMask
from entasis.shape.model_config import ModelConfig
from entasis.shape.records import LayerShape

_FLASH_DIM_LIMIT = 256
_FLASH_DIM_MULTIPLE = 8


class Attention(nn.Module):
    """The update that attention adds to the stream: out(attention(qkv(norm(x)))).

    One fused `qkv` weight; its rows are all queries head by head, then all keys, then all values. It reads only the
    first `qkv_input` coordinates of the normalised state: beyond them the state is zero for certain
    (`entasis.shape.stream.qkv_input_widths`). The norm still spans, and divides by, the whole width.
    """

    def __init__(self, layer: LayerShape, qkv_input: int, config: ModelConfig) -> None:
        super().__init__()
        self.layer = layer
        self.causal = config.causal
        self.scale = layer.head_dim**-0.5 if config.attention_scale == "sqrt" else 1 / layer.head_dim
        self.norm = Norm(layer.width, config)
        self.qkv = Projection(qkv_input, layer.qkv_width, bias=config.bias)
        self.out = Projection(layer.heads * layer.value_head_dim, layer.width, bias=config.bias)

    def forward(
        self,
        x: Float[Tensor, "batch time width"],
        rotation: Rotation | None = None,
        mask: Mask = None,
    ) -> Float[Tensor, "batch time width"]:
        """The update to `x`.

        Args:
            x: the layer's prefix of the stream.
            rotation: how rotary positions turn this layer's queries and keys; None: not at all.
            mask: True where a query may attend to a key, or that of this layer's window; None: everything, up to itself
                if causal.
        """
        layer = self.layer
        normed = self.norm(x)
        if self.qkv.in_width < layer.width:
            normed = normed[..., : self.qkv.in_width]
        turned_heads = layer.heads + layer.kv_heads
        turned, values = self.qkv(normed).split(
            [turned_heads * layer.head_dim, layer.kv_heads * layer.value_head_dim], dim=-1
        )
        turned = turned.unflatten(-1, (turned_heads, layer.head_dim))
        values = values.unflatten(-1, (layer.kv_heads, layer.value_head_dim)).transpose(1, 2)
        if rotation is not None:
            # Queries and keys are turned in one go; the rotation is exact to its own dtype and rounded only here.
            turned = rotate(turned, rotation).to(values.dtype)
        queries, keys = turned.transpose(1, 2).split([layer.heads, layer.kv_heads], dim=1)
        if isinstance(mask, WindowMask):
            attended = mask.attend(self._attend, queries, keys, values)
        else:
            attended = self._attend(queries, keys, values, mask)
        update: Tensor = self.out(attended.transpose(1, 2).flatten(-2))
        return update

    def _attend(
        self,
        queries: Float[Tensor, "batch heads time head_dim"],
        keys: Float[Tensor, "batch kv_heads time head_dim"],
        values: Float[Tensor, "batch kv_heads time value_dim"],
        mask: Bool[Tensor, "batch 1 time time"] | None,
    ) -> Float[Tensor, "batch heads time value_dim"]:
        group = self.layer.heads // self.layer.kv_heads
        grouped = group > 1
        if grouped and not _groups_in_kernel(queries, values, mask):
            keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
            grouped = False
        return functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=self.causal and mask is None,
            scale=self.scale,
            enable_gqa=grouped,
        )


def _groups_in_kernel(queries: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Whether the fast kernel of this device takes grouped keys and values as they are.

    On CUDA only flash attention does; whatever it refuses would fall to the slow kernel without a word, so that
    expanding the keys and values is the cheaper way.
    """
    if queries.device.type == "cpu":
        return True
    return (
        queries.device.type == "cuda"
        and queries.dtype in (torch.float16, torch.bfloat16)
        and mask is None
        and queries.shape[-1] == values.shape[-1] <= _FLASH_DIM_LIMIT
        and queries.shape[-1] % _FLASH_DIM_MULTIPLE == 0
    )
