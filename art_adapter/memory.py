"""How much memory a forward needs, estimated from the whole model so that every stage of a pipeline plans alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from .requests import ForwardInput

ACTIVATIONS_PER_LAYER = 16
"""Hidden-sized tensors that one layer keeps per token until its backward, roughly."""
TENSORS_PER_SCORE = 3
"""Scores, probabilities and mask of the dense attention, per pair of tokens and head, roughly."""


@attrs.frozen
class MemoryCheck:
    """An estimate against what is there, in bytes; over all ranks the worst of both."""

    estimated_required_bytes: int
    available_bytes: int

    @property
    def fits(self) -> bool:
        return self.estimated_required_bytes <= self.available_bytes


def forward_bytes(config: Any, packed_tokens_by_group: Sequence[int]) -> int:
    """Activations of a forward over packed groups, kept until their backward."""
    size = config.params_dtype.itemsize
    per_token = ACTIVATIONS_PER_LAYER * config.hidden_size * size
    per_pair = TENSORS_PER_SCORE * config.num_attention_heads * size
    return int(config.num_layers * sum(n * per_token + n * n * per_pair for n in packed_tokens_by_group))


def output_bytes(config: Any, vocabulary: int, requests: Sequence[ForwardInput]) -> int:
    """What is handed to the caller."""
    size = config.params_dtype.itemsize
    total = 0
    for request in requests:
        tokens = request.input_tokens.numel()
        total += 4 * (request.target_tokens.numel() if request.target_tokens is not None else 0)
        total += tokens * (request.top_k or 0) * (4 + 8)
        total += tokens * size * (vocabulary * request.logits + config.hidden_size * request.hidden_states)
    return total


def window_widths(remaining: int, dp_size: int) -> list[int]:
    """How many top-level items a window may span over all data-parallel ranks: whole rounds, or all that is left."""
    rounds = range(min(dp_size, remaining), remaining, dp_size)
    return [*rounds, remaining]
