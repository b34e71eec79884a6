"""Real processes for the adapter's tests: forked from a server that has imported Megatron, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..run.processes import _SERVER, Crash, run_in_processes

PRELOADED = ["torch.distributed", "pipeline_engine.testing", "pytest", "hypothesis", "art_adapter.trainer"]


def on_ranks(function: Callable[..., Any], ranks: int, *arguments: Any, timeout: float = 100.0) -> list[Any]:
    """``function(rank, *arguments)`` on every rank of a gloo world; what each returned.

    Raises:
        AssertionError: a rank raised, died or took longer than ``timeout`` seconds.
    """
    _SERVER.set_forkserver_preload(PRELOADED)  # of effect until the server runs
    found = run_in_processes(function, ranks, *arguments, timeout=timeout)
    for rank, each in enumerate(found):
        assert not isinstance(each, Crash), f"rank {rank}:\n{each}"
    return found
