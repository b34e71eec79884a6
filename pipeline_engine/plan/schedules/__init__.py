"""The registry of schedules: a name for each page, and ``build``."""

from __future__ import annotations

from collections.abc import Callable

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.actions import Program
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.schedules.gpipe import gpipe
from pipeline_engine.plan.schedules.one_forward_one_backward import one_forward_one_backward

StraightRecipe = Callable[[int, int], tuple[Program, ...]]

SCHEDULES: dict[str, StraightRecipe] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def build(name: str, graph: StageGraph, num_microbatches: int) -> Schedule:
    """Build a schedule of the registry.

    Args:
        name: one of ``SCHEDULES``.
        graph: the stage graph that it is for.
        num_microbatches: m >= 0.

    Raises:
        ScheduleError: the name is unknown, the graph does not fit the schedule, or m is negative.
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"schedule {name!r} is unknown; one of {', '.join(map(repr, SCHEDULES))}.")
    if num_microbatches < 0:
        raise ScheduleError(f"num_microbatches is {num_microbatches}; it is 0 or more.")
    if not graph.is_straight:
        raise ScheduleError(
            f"schedule {name!r} runs on a straight chain, one stage a rank; got edges {list(graph.edges)} "
            f"with rank_of {list(graph.rank_of)}."
        )
    return Schedule(name, graph, num_microbatches, SCHEDULES[name](graph.num_stages, num_microbatches))
