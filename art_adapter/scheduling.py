"""How the chunks of all ranks are stages, and which schedule runs where the caller names none."""

from __future__ import annotations

import logging

from pipeline_engine import StageGraph

_log = logging.getLogger(__name__)


def chain_of(*, ranks: int, chunks: int) -> StageGraph:
    """The stages of a pipeline as Megatron numbers them: chunk v of rank p is stage v P + p."""
    return StageGraph.chain(ranks * chunks, ranks, "straight" if chunks == 1 else "looped")


def schedule_for(graph: StageGraph) -> str:
    """A name of ``pipeline_engine.SCHEDULES``, the same on every rank: it depends on the stage graph alone."""
    return "1f1b" if graph.is_straight else "interleaved"


def log_choice(schedule: str, graph: StageGraph, *, rank: int, was_named: bool) -> None:
    """Say once for each pipeline, on its first rank, what runs and why."""
    why = "as the caller says" if was_named else "chosen by the number of stages per rank"
    if rank == 0:
        _log.info("schedule %s, %s: %d stages on %d ranks", schedule, why, graph.num_stages, graph.num_ranks)
