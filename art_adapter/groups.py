"""The ranks that run one data-parallel rank's forward together: those of TP x CP x PP."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from .agreement import gather


def forward_group() -> Any:
    """A process group of these ranks; collective over the world the first time.

    Megatron's own model-parallel group is TP x PP; with context-parallel ranks it has none that fits, and one is made.
    """
    if parallel_state.get_context_parallel_world_size() == 1:
        return parallel_state.get_model_parallel_group()
    members: dict[int, list[int]] = {}
    for rank, data_rank in enumerate(gather(parallel_state.get_data_parallel_rank())):
        members.setdefault(data_rank, []).append(rank)
    groups = {data_rank: _made(dist.group.WORLD, tuple(ranks)) for data_rank, ranks in sorted(members.items())}
    return groups[parallel_state.get_data_parallel_rank()]


@cache
def _made(world: Any, ranks: tuple[int, ...]) -> Any:
    """A group is made once for each world: it costs threads and file descriptors, and nobody knows its last user."""
    return dist.new_group(list(ranks))
