"""What all ranks must know alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def gather(value: Any) -> list[Any]:
    """Every rank's value, by rank; collective over the world."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def largest(values: Sequence[int], *, device: torch.device, group: Any = None) -> list[int]:
    """The largest of each value over the ranks of a group, by default the world."""
    found = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return [int(value) for value in found.tolist()]
