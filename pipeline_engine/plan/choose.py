"""Choose: schedule, number in flight and order for uneven microbatches under a memory budget, with the reason.

Every schedule of the registry that fits the graph is tried with several numbers in flight and a few simple orders;
for the most promising ones the order is searched, and the best of those are simulated.  Nothing is drawn at random:
every rank that asks the same question gets the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from attrs import evolve, frozen

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.limit import refitted
from pipeline_engine.plan.order import in_order, weights_of
from pipeline_engine.plan.outline import Outline, PerStage, of_stage
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.schedules import SCHEDULES, build
from pipeline_engine.plan.search import Judged, Search
from pipeline_engine.plan.simulate import Costs, Timeline, peak_in_flight, simulate
from pipeline_engine.plan.starts import Order, SimpleOrders

_SEARCHED = 5
_SIMULATED = 3
_QUARTERS = range(1, 9)  # numbers in flight that are tried, in quarters of the schedule's own


@frozen
class Choice:
    """What ``best_schedule`` found.

    Attributes:
        schedule: its programs are numbered by place in the order.
        order: for each place the caller's microbatch that stands there.
        max_in_flight: activations that the fullest rank holds at once.
        peak_bytes: bytes that the fullest rank holds at once.
        timeline: what the simulator expects, numbered as the schedule.
        reason: one line on what was chosen and what it was preferred to.
    """

    schedule: Schedule
    order: Order
    max_in_flight: int
    peak_bytes: float
    timeline: Timeline
    reason: str


@frozen(eq=False)
class _Candidate:
    schedule: Schedule
    max_in_flight: int
    search: Search
    judged: Judged
    order: Order


def best_schedule(
    graph: StageGraph,
    costs: Costs,
    *,
    num_microbatches: int | None = None,
    memory_budget: float = math.inf,
    activation_bytes: PerStage = 1.0,
    schedules: Sequence[str] | None = None,
) -> Choice:
    """Choose schedule, number in flight and order.

    Args:
        graph: the stage graph.
        costs: seconds, with the weight of every microbatch.
        num_microbatches: needed if ``costs`` has no weights.
        memory_budget: bytes of activations that a rank may hold.
        activation_bytes: what a stage keeps of a microbatch of weight 1 from its forward to the end of its backward;
            a number, or one for each stage.
        schedules: names to choose from; all of ``SCHEDULES`` if None.

    Raises:
        ScheduleError: no schedule fits the graph, or nothing fits the budget; the message says what is missing.
    """
    count = len(costs.weights) if num_microbatches is None else num_microbatches
    if num_microbatches is None and not costs.weights:
        raise ScheduleError("the number of microbatches is unknown: give costs with weights, or num_microbatches=.")
    weights = weights_of(costs, count)
    of_stage(activation_bytes, graph.last_stage)
    tried = _tried(_fitting(graph, count, schedules), costs, activation_bytes, weights, memory_budget)
    searched = [_searched(candidate) for candidate in tried[:_SEARCHED]]
    searched.sort(key=lambda candidate: candidate.judged)
    if searched[0].judged[0] > 0:
        raise ScheduleError(_too_little(searched[0], memory_budget))
    best, timeline = _best_simulated([each for each in searched if each.judged[0] == 0], costs)
    peak = best.search.outline.peak([weights[m] for m in best.order])
    reason = _reason(best, timeline, peak, memory_budget, weights, searched)
    return Choice(best.schedule, best.order, best.max_in_flight, peak, timeline, reason)


def _fitting(graph: StageGraph, count: int, names: Sequence[str] | None) -> list[Schedule]:
    refusals: list[str] = []
    built: list[Schedule] = []
    for name in SCHEDULES if names is None else names:
        try:
            built.append(build(name, graph, count))
        except ScheduleError as error:
            if names is not None and name not in SCHEDULES:
                raise
            refusals.append(str(error))
    if not built:
        raise ScheduleError("no schedule fits:\n" + "\n".join(f"  {refusal}" for refusal in refusals))
    return built


def _tried(
    schedules: Iterable[Schedule],
    costs: Costs,
    activation_bytes: PerStage,
    weights: Sequence[float],
    memory_budget: float,
) -> list[_Candidate]:
    """Every schedule with every number in flight and its best simple order, the most promising first."""
    tried, simple = [], SimpleOrders(weights)
    for schedule in schedules:
        for limited in _with_limits(schedule, saving=memory_budget < math.inf):
            try:
                outline = Outline.of(limited, costs, activation_bytes)
            except ScheduleError:  # with this number in flight the programs cannot go through
                continue
            search = Search(outline, simple, memory_budget)
            tried.append(_Candidate(limited, _most_in_flight(limited), search, *min(search.starts)))
    return sorted(tried, key=lambda candidate: (candidate.judged, candidate.max_in_flight))


def _with_limits(schedule: Schedule, *, saving: bool) -> list[Schedule]:
    """The schedule with more in flight, and, if memory has to be saved, with fewer."""
    own = _most_in_flight(schedule)
    most = max(len(program) for program in schedule.programs) // 2
    numbers = {min(-(-own * quarters // 4), most) for quarters in _QUARTERS if saving or quarters >= 4}
    return [refitted(schedule, number) for number in sorted({own, *numbers} - {0})] or [schedule]


def _best_simulated(searched: Sequence[_Candidate], costs: Costs) -> tuple[_Candidate, Timeline]:
    """The best by the simulator.  An outline leaves delays out: what is no better by outline need not be simulated."""
    best, timeline = searched[0], simulate(searched[0].schedule, in_order(costs, searched[0].order))
    for candidate in searched[1:_SIMULATED]:
        if candidate.judged[1] >= timeline.makespan:
            break
        other = simulate(candidate.schedule, in_order(costs, candidate.order))
        if other.makespan < timeline.makespan:
            best, timeline = candidate, other
    return best, timeline


def _searched(candidate: _Candidate) -> _Candidate:
    judged, order = candidate.search.best()
    return evolve(candidate, judged=judged, order=order)


def _most_in_flight(schedule: Schedule) -> int:
    return max(peak_in_flight(program) for program in schedule.programs)


def _too_little(best: _Candidate, memory_budget: float) -> str:
    return (
        f"memory_budget is {memory_budget:,.0f} bytes; the least that was found, {best.schedule.name!r} with "
        f"{best.max_in_flight} in flight, holds {memory_budget + best.judged[0]:,.0f} on one rank: "
        "make microbatches smaller."
    )


def _reason(
    best: _Candidate,
    timeline: Timeline,
    peak: float,
    memory_budget: float,
    weights: Sequence[float],
    searched: Sequence[_Candidate],
) -> str:
    as_packed = best.search.outline.makespan(weights)
    words = [
        f"{best.schedule.name} with {best.max_in_flight} in flight: {timeline.makespan:.4g} s and "
        f"{timeline.bubble:.1%} idle expected",
        f"{as_packed:.4g} s in the order given",
    ]
    if memory_budget < math.inf:
        words.append(f"{peak:,.0f} of {memory_budget:,.0f} bytes")
    others = [each for each in searched if each is not best]
    if others:
        words.append(
            f"next best {others[0].schedule.name} with {others[0].max_in_flight} in flight, {others[0].judged[1]:.4g} s"
        )
    return "; ".join(words) + "."
