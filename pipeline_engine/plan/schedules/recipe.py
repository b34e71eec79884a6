"""Recipes: what the registry knows of a page, and which graphs a schedule runs on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from attrs import frozen

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.actions import Compute
from pipeline_engine.plan.graph import Placement, StageGraph


@frozen
class Demand:
    """Where the stages of a graph must lie for a schedule to make sense.

    Note [any edges]: a demand is about ranks, not about edges.  Stages are numbered along the graph, so programs that
    do not deadlock on a chain do not deadlock on any graph whose stages lie alike: its edges ask for less.

    Args:
        text: for an error.
        placement: of a chain that meets it.
        is_met: whether a graph meets it.
    """

    text: str
    placement: Placement
    is_met: Callable[[StageGraph], bool]


ANYWHERE = Demand("any placement", "straight", lambda graph: True)
ONE_EACH = Demand("one stage on each rank", "straight", lambda graph: graph.num_stages == graph.num_ranks)
IN_LOOPS = Demand("stage s on rank s mod P", "looped", lambda graph: graph.is_placed("looped"))
DOWN_AND_UP = Demand("two stages a rank, down and up again", "vee", lambda graph: graph.is_placed("vee"))


@frozen
class Recipe:
    """A schedule for any graph that meets its demand, and any number of microbatches.

    Args:
        program: one rank's actions, generated while they are read.
        demand: where the stages must lie.
    """

    program: Callable[[StageGraph, int, int], Iterator[Compute]]
    demand: Demand

    @property
    def placement(self) -> Placement:
        """The placement of a chain that it runs on."""
        return self.demand.placement

    @property
    def page(self) -> str:
        """Sentence, picture, cost and source."""
        return sys.modules[self.program.__module__].__doc__ or ""

    def check_fits(self, name: str, graph: StageGraph) -> None:
        """Raise ScheduleError if ``graph`` does not meet the demand."""
        if not self.demand.is_met(graph):
            raise ScheduleError(
                f"schedule {name!r} wants {self.demand.text}, as StageGraph.chain(.., placement="
                f"{self.placement!r}) puts them; got rank_of {list(graph.rank_of)}."
            )
