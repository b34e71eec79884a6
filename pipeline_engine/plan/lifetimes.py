"""Lifetimes: how often a value is read on a rank, and so when it is freed."""

from __future__ import annotations

from functools import lru_cache

from pipeline_engine.plan.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    maker_of,
    needs,
    takers_of,
)
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.values import Activation, InputGrad, Output, OutputGrad, Value


def reads(value: Value, rank: int, graph: StageGraph, *, hand_out: bool = True) -> int:
    """How many actions read ``value`` on ``rank``: stages that take it, sends, the publish and the yield.

    The value is freed after that many reads.  What a stage keeps for its own backward is not counted: it is freed by
    that backward.

    Args:
        value: made on ``rank``, or received there.
        rank: where it is read.
        graph: the stage graph.
        hand_out: whether outputs travel to every rank; otherwise only the last stage's rank has them.
    """
    match value:
        case Activation(stage, _) | InputGrad(stage, _):
            return _reads_of_staged(isinstance(value, Activation), stage, rank, graph)
        case Output():
            return 1 + (_passed_on(rank, graph) if hand_out else 0)
        case OutputGrad():
            return 1


@lru_cache(maxsize=4096)
def outlives_its_sends(stage: int, graph: StageGraph) -> bool:
    """Whether the output of ``stage`` is read on its own rank by others than sends: by stages there, or the caller."""
    here = (graph.rank_of[after] == graph.rank_of[stage] for after in graph.after(stage))
    return stage == graph.last_stage or any(here)


def read_by(action: Action, graph: StageGraph) -> tuple[Value, ...]:
    """The values that ``action`` reads from where they are kept: its needs without what its stage keeps for itself."""
    match action:
        case Backward(stage, m) | BackwardInput(stage, m):
            return tuple(value for value in needs(action, graph) if value != Activation(stage, m))
        case BackwardWeight():
            return ()
        case _:
            return needs(action, graph)


@lru_cache(maxsize=4096)
def _reads_of_staged(is_activation: bool, stage: int, rank: int, graph: StageGraph) -> int:
    """The same for every microbatch, and asked for each value that is kept."""
    value = Activation(stage, 0) if is_activation else InputGrad(stage, 0)
    takers = graph.after(stage) if is_activation else graph.before(stage)
    here = sum(graph.rank_of[taker] == rank for taker in takers)
    published = is_activation and stage == graph.last_stage
    sends = len(takers_of(value, graph)) if maker_of(value, graph) == rank else 0
    return here + published + sends


@lru_cache(maxsize=4096)
def _passed_on(rank: int, graph: StageGraph) -> int:
    return sum(source == rank for source, _ in graph.deliveries())
