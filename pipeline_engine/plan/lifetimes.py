"""Lifetimes: how often a value is read on a rank, and so when it is freed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from attrs import frozen

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


@frozen
class Reads:
    """How many actions read a value on one rank: stages that take it, sends, the publish and the yield.

    The value is freed after that many reads.  What a stage keeps for its own backward is not counted: it is freed by
    that backward.

    Attributes:
        activations, input_grads: of each stage, whatever the microbatch.
        outputs: of each output.
    """

    activations: tuple[int, ...]
    input_grads: tuple[int, ...]
    outputs: int

    def of(self, value: Value) -> int:
        """How often ``value`` is read where it was made, or received."""
        match value:
            case Activation():
                return self.activations[value.stage]
            case InputGrad():
                return self.input_grads[value.stage]
            case Output():
                return self.outputs
            case OutputGrad():
                return 1


@lru_cache(maxsize=4096)
def reads_on(rank: int, graph: StageGraph, *, hand_out: bool = True) -> Reads:
    """The reads on ``rank``.

    Args:
        rank: where values are read.
        graph: the stage graph.
        hand_out: whether outputs travel to every rank; otherwise only the last stage's rank has them.
    """
    stages = range(graph.num_stages)
    passed_on = sum(source == rank for source, _ in graph.deliveries())
    return Reads(
        tuple(_reads(Activation(s, 0), graph.after(s), rank, graph) + (s == graph.last_stage) for s in stages),
        tuple(_reads(InputGrad(s, 0), graph.before(s), rank, graph) for s in stages),
        1 + (passed_on if hand_out else 0),
    )


def _reads(value: Value, takers: Iterable[int], rank: int, graph: StageGraph) -> int:
    here = sum(graph.rank_of[taker] == rank for taker in takers)
    return here + (len(takers_of(value, graph)) if maker_of(value, graph) == rank else 0)


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
