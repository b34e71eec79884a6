"""The registry of schedules: a name for each page, and ``build``."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.actions import Compute
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.schedules.dualpipe_v import dualpipe_v
from pipeline_engine.plan.schedules.gpipe import gpipe
from pipeline_engine.plan.schedules.interleaved import interleaved
from pipeline_engine.plan.schedules.looped_bfs import looped_bfs
from pipeline_engine.plan.schedules.one_forward_one_backward import one_forward_one_backward
from pipeline_engine.plan.schedules.recipe import ANYWHERE, DOWN_AND_UP, IN_LOOPS, ONE_EACH, Recipe
from pipeline_engine.plan.schedules.zb_h1 import zb_h1
from pipeline_engine.plan.schedules.zb_v import zb_v

SCHEDULES: dict[str, Recipe] = {
    "gpipe": Recipe(gpipe, ANYWHERE),
    "1f1b": Recipe(one_forward_one_backward, ONE_EACH),
    "interleaved": Recipe(interleaved, IN_LOOPS),
    "looped-bfs": Recipe(looped_bfs, IN_LOOPS),
    "zb-h1": Recipe(zb_h1, ONE_EACH),
    "zb-v": Recipe(zb_v, DOWN_AND_UP),
    "dualpipe-v": Recipe(dualpipe_v, DOWN_AND_UP),
}


def build(name: str, graph: StageGraph, num_microbatches: int) -> Schedule:
    """Build a schedule of the registry.

    Args:
        name: one of ``SCHEDULES``.
        graph: the stage graph that it is for.
        num_microbatches: m >= 0.

    Raises:
        ScheduleError: the name is unknown, the graph does not fit the schedule, or m is negative.
    """
    return Schedule(name, graph, num_microbatches, generate(name, graph, num_microbatches))


def generate(name: str, graph: StageGraph, num_microbatches: int) -> list[Iterator[Compute]]:
    """As ``build``, but each rank's program is generated while it is read, for plans that are too large to hold.

    Args:
        name, graph, num_microbatches: as ``build`` takes them.

    Returns:
        for each rank an iterator over its computing actions.

    Raises:
        As ``build``.
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"schedule {name!r} is unknown; one of {', '.join(map(repr, SCHEDULES))}.")
    if num_microbatches < 0:
        raise ScheduleError(f"num_microbatches is {num_microbatches}; it is 0 or more.")
    recipe = SCHEDULES[name]
    recipe.check_fits(name, graph)
    return [recipe.program(graph, num_microbatches, rank) for rank in range(graph.num_ranks)]
