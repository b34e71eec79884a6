"""A packed row shared out over context-parallel ranks, token by token: rank c of C has the tokens c, c + C, c + 2 C.

So each rank has a like part of every sequence, and of the work of causal attention.  Queries stay where they are; keys
and values are gathered, and their gradients come back to the ranks that they belong to.
Source: Brandon et al. 2023, Striped Attention, arXiv:2311.09431, section 3; there keys travel in a ring.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.dot_product_attention import DotProductAttention


def own_rows(length: int) -> torch.Tensor:
    """The places of this rank's tokens in a row of ``length`` tokens, int64."""
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    return torch.arange(rank, length, size)


def own_places(places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a sequence's places in the whole row: those in this rank's share, and which of its tokens stand there."""
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    source = torch.nonzero(places % size == rank).flatten()
    return places[source] // size, source


class ContextAttention(DotProductAttention):  # type: ignore[misc]  # megatron has no types
    """Megatron's attention of this rank's queries to the keys of all ranks.

    The mask says which: ``[1, 1, own tokens, all tokens]``, True where attention is hidden.
    """

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # Megatron leaves larger ones to Transformer Engine
        super().__init__(alone, *arguments, **options)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any, **options: Any
    ) -> Any:
        return super().forward(query, _of_all_ranks(key), _of_all_ranks(value), *arguments, **options)


def _of_all_ranks(own: torch.Tensor) -> torch.Tensor:
    """``[own tokens, ...]`` of every rank as ``[all tokens, ...]``, in the order of the row."""
    group = parallel_state.get_context_parallel_group()
    by_rank: torch.Tensor = tensor_parallel.gather_from_sequence_parallel_region(own, group=group)
    return by_rank.view(group.size(), *own.shape).transpose(0, 1).flatten(0, 1)


def give_whole_rotary_table(model: Any) -> None:
    """Have a GPTModel hand out the table of the whole context, from which rows are taken by position.

    Megatron's own share of it is for sequences that are cut in two pieces a rank.
    """
    model.rotary_pos_emb.cp_group = None
