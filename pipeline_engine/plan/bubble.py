"""Bubble: for each rank where its time went, and for idle time why it was idle.

fill      before its first action: the first microbatch was on its way here
drain     after its last one
wait      another rank had not made what the next action needs
latency   it was made and had not arrived
between   nothing was missing: what the engine itself takes, or a receive that was posted late
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, fields, frozen

from pipeline_engine.plan.actions import COMPUTE, Action, Yield, makes, needs
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.simulate import Span, Timeline
from pipeline_engine.plan.values import Activation, Output, OutputGrad, Value


@frozen
class Shares:
    """Seconds of one rank; together they are the makespan."""

    compute: float = 0.0
    caller: float = 0.0
    fill: float = 0.0
    drain: float = 0.0
    wait: float = 0.0
    latency: float = 0.0
    between: float = 0.0

    @property
    def idle(self) -> float:
        """Seconds in which neither a stage nor the caller's code ran."""
        return self.fill + self.drain + self.wait + self.latency + self.between


CAUSES = tuple(attribute.name for attribute in fields(Shares))


def shares(timeline: Timeline, graph: StageGraph) -> tuple[Shares, ...]:
    """Where every rank's time went."""
    made: dict[Value, tuple[float, int]] = {}
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            for value in makes(span.action) if isinstance(span.action, COMPUTE) else ():
                made[value] = (span.end, rank)
    return tuple(_shares_of(rank, spans, timeline.makespan, graph, made) for rank, spans in enumerate(timeline.spans))


def _shares_of(
    rank: int, spans: Sequence[Span], makespan: float, graph: StageGraph, made: dict[Value, tuple[float, int]]
) -> Shares:
    if not spans:
        return Shares(fill=makespan)
    total = Shares(fill=spans[0].start, drain=makespan - spans[-1].end)
    now = spans[0].start
    for span in spans:
        total = _added(total, "caller" if isinstance(span.action, Yield) else "compute", span.end - span.start)
        if (gap := span.start - now) > 0:
            ready = [made[value] for value in _needs(span.action, graph) if value in made]
            elsewhere = [end for end, maker in ready if maker != rank]
            waited = min(max(max(elsewhere, default=now) - now, 0.0), gap)
            total = _added(total, "wait", waited)
            total = _added(total, "latency" if elsewhere else "between", gap - waited)
        now = max(now, span.end)
    return total


def _needs(action: Action, graph: StageGraph) -> list[Value]:
    """What is needed, an output being as good as what the last stage returned, and a gradient of it as the output."""
    wanted: list[Value] = []
    for value in needs(action, graph):
        if isinstance(value, (Output, OutputGrad)):
            wanted.append(Activation(graph.last_stage, value.microbatch))
        else:
            wanted.append(value)
    return wanted


def _added(total: Shares, name: str, seconds: float) -> Shares:
    return evolve(total, **{name: getattr(total, name) + seconds})
