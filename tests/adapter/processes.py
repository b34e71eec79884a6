"""Real processes for the adapter's tests: forked from a server that has imported Megatron, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..run.processes import _SERVER, Crash, World

PRELOADED = ["torch.distributed", "pipeline_engine.testing", "pytest", "hypothesis", "art_adapter.trainer"]


def on_ranks(function: Callable[..., Any], ranks: int, *arguments: Any, timeout: float = 100.0) -> list[Any]:
    """``function(rank, *arguments)`` on every rank of a gloo world; what each returned.

    Raises:
        AssertionError: a rank raised, died or took longer than ``timeout`` seconds.
    """
    world = world_of(ranks, timeout=timeout)
    try:
        return returned(world, function, *arguments)
    finally:
        world.end()


def world_of(ranks: int, *, timeout: float) -> World:
    """So many processes that stay; ``timeout``: seconds for each function that they run."""
    _SERVER.set_forkserver_preload(PRELOADED)  # of effect until the server runs
    return World(ranks, timeout=timeout)


def returned(world: World, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``function(rank, *arguments)`` returned on every rank.

    Raises:
        AssertionError: a rank raised, died or took longer than the world allows.
    """
    found = world.run(function, *arguments)
    for rank, each in enumerate(found):
        assert not isinstance(each, Crash), f"rank {rank}:\n{each}"
    return found
