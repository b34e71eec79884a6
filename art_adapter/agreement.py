"""What all ranks must know alike, and how they fail together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pipeline_engine import UsageError

T = TypeVar("T")


def gather(value: Any, *, group: Any = None) -> list[Any]:
    """The value of every rank of a group, by default the world; collective over it."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def largest(values: Sequence[int], *, device: torch.device, group: Any = None) -> list[int]:
    """The largest of each value over the ranks of a group, by default the world."""
    found = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return [int(value) for value in found.tolist()]


def check_same(
    what: str, said: str, *, numbers: Sequence[float] = (), device: torch.device, group: Any
) -> list[list[float]]:
    """Let all ranks of a group go on only if they say the same; collective over it.

    Args:
        what: an error begins with it.
        said: to be the same.
        numbers: told to all ranks on the way, of any value but as many on each.

    Returns:
        the numbers of every rank.

    Raises:
        UsageError: on every rank, with both sides.
    """
    digest = int.from_bytes(hashlib.sha256(said.encode()).digest()[:6], "big")  # 48 bits: exact in a float64
    own = torch.tensor([digest, *numbers], dtype=torch.float64, device=device)
    told = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(told, own, group=group)
    by_rank = [each.tolist() for each in told]
    if any(each[0] != digest for each in by_rank):
        raise _unlike(what, gather(said, group=group), group)
    return [each[1:] for each in by_rank]


def _unlike(what: str, by_rank: Sequence[str], group: Any) -> UsageError:
    other = next(rank for rank, words in enumerate(by_rank) if words != by_rank[0])
    first, differs = (dist.get_global_rank(group, rank) for rank in (0, other))
    return UsageError(
        f"{what}: rank {first} has\n  {by_rank[0]}\nrank {differs} has\n  {by_rank[other]}\n"
        "all stages of a model and their tensor- and context-parallel ranks plan the same; "
        "pass the same inputs on all of them."
    )


def together(what: str, function: Callable[[], T]) -> T:
    """Do something that may fail on one rank alone; if it does, all ranks raise. Collective over the world.

    Raises:
        Exception: as this rank's function, or else of the type that another rank's function raised.
    """
    failure: Exception | None = None
    try:
        result = function()
    except Exception as error:
        failure = error
    told = gather(None if failure is None else (type(failure), str(failure)))
    if failure is not None:
        raise failure
    for rank, failed in enumerate(told):
        if failed is not None:
            raise _of_kind(failed[0], f"{what} failed on rank {rank}: {failed[1]}")
    return result


def _of_kind(kind: type[Exception], text: str) -> Exception:
    try:
        return kind(text)
    except TypeError:  # made from other arguments than a text
        return RuntimeError(f"{text} ({kind.__name__})")
