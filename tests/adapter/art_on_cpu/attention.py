"""Attention over a packed row on a CPU: ART's own mask, evaluated to a dense one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class DenseTreeAttention(nn.Module):
    """FlexAttention has no backward on a CPU; this sees the same tokens."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        attention_bias: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        visible = _visible(attention_bias, q.shape[2])
        output = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, enable_gqa=q.shape[1] != k.shape[1]
        )
        return output.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


def _visible(state: Any, length: int) -> torch.Tensor:
    """``[1, 1, length, length]`` bool; state: ART's PrefixTreeAttentionState."""
    place, zero = torch.arange(length), torch.zeros((), dtype=torch.long)
    mask: torch.Tensor = state.block_mask.mask_mod(zero, zero, place[:, None], place[None, :])
    return mask.expand(length, length)[None, None]
