"""Lifetimes: how often a value is read on a rank, and so when it is freed."""

from __future__ import annotations

from pipeline_engine.plan.actions import maker_of, takers_of
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.values import Activation, InputGrad, Output, OutputGrad, Value


def reads(value: Value, rank: int, graph: StageGraph) -> int:
    """How many actions read ``value`` on ``rank``: stages that take it, sends, and the publish of the last stage.

    The value is freed after that many reads.  What a stage keeps for its own backward is not counted: it is freed by
    that backward.
    """
    match value:
        case Activation(stage, _):
            takers = _count(graph.after(stage), rank, graph) + (stage == graph.last_stage)
        case InputGrad(stage, _):
            takers = _count(graph.before(stage), rank, graph)
        case Output():
            relay = graph.relay()
            return 1 + (rank != relay[-1])
        case OutputGrad():
            return 1
    sends = len(takers_of(value, graph)) if maker_of(value, graph) == rank else 0
    return takers + sends


def _count(stages: tuple[int, ...], rank: int, graph: StageGraph) -> int:
    return sum(graph.rank_of[stage] == rank for stage in stages)
