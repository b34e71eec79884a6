"""Bubble: for each rank where its time went, simulated or measured, and for idle time why it was idle.

The causes are those of ``Idle``: fill, drain, imbalance, latency; ``Phases`` tells the first three apart, here and in
the simulator, which knows of every message when it left and need not infer the fourth.  A real run knows one more,
``engine``: nothing was missing, but what the engine does between two actions takes time, or a receive was posted late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve, fields, frozen

from pipeline_engine.plan.actions import COMPUTE, Action, Yield, makes, needs
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.timeline import Phases, Span, Timeline
from pipeline_engine.plan.values import Activation, Output, OutputGrad, Value


@frozen
class Shares:
    """Seconds of one rank; together they are the makespan."""

    compute: float = 0.0
    caller: float = 0.0
    fill: float = 0.0
    drain: float = 0.0
    imbalance: float = 0.0
    latency: float = 0.0
    engine: float = 0.0

    @property
    def idle(self) -> float:
        """Seconds in which neither a stage nor the caller's code ran."""
        return self.fill + self.drain + self.imbalance + self.latency + self.engine


CAUSES = tuple(attribute.name for attribute in fields(Shares))

_Made = Mapping[Value, tuple[float, int]]
"""When a value was made, and on which rank."""


def shares(timeline: Timeline, graph: StageGraph) -> tuple[Shares, ...]:
    """Where every rank's time went."""
    made = {
        value: (span.end, rank)
        for rank, spans in enumerate(timeline.spans)
        for span in spans
        if isinstance(span.action, COMPUTE)
        for value in makes(span.action)
    }
    return tuple(_shares_of(rank, spans, timeline.makespan, graph, made) for rank, spans in enumerate(timeline.spans))


def _shares_of(rank: int, spans: Sequence[Span], makespan: float, graph: StageGraph, made: _Made) -> Shares:
    total, now = Shares(), 0.0
    phases = Phases.of([span.action for span in spans])
    for step, span in enumerate(spans):
        for name, seconds in _gap(rank, span, now, phases.cause(step), graph, made).items():
            total = _added(total, name, seconds)
        total = _added(total, "caller" if isinstance(span.action, Yield) else "compute", span.end - span.start)
        now = max(now, span.end)
    return _added(total, "drain", makespan - now)


def _gap(rank: int, span: Span, now: float, cause: str, graph: StageGraph, made: _Made) -> dict[str, float]:
    """The idle seconds before an action, by cause: until what it needs was made elsewhere, and from then on."""
    gap = max(span.start - now, 0.0)
    elsewhere = [end for end, maker in (made[v] for v in _needs(span.action, graph) if v in made) if maker != rank]
    if not elsewhere:
        return {"engine": gap}
    late = min(max(max(elsewhere) - now, 0.0), gap)
    return {cause: late, "latency": gap - late}


def _needs(action: Action, graph: StageGraph) -> list[Value]:
    """What is needed, an output being as good as what the last stage returned, and a gradient of it as the output."""
    return [
        Activation(graph.last_stage, value.microbatch) if isinstance(value, (Output, OutputGrad)) else value
        for value in needs(action, graph)
    ]


def _added(total: Shares, name: str, seconds: float) -> Shares:
    return evolve(total, **{name: getattr(total, name) + seconds})
