"""Trace: what really happened on every rank, in the schedule's own actions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from attrs import field, frozen

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.actions import (
    COMPUTE,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    PostRecv,
    Send,
    WaitRecv,
    Yield,
)
from pipeline_engine.plan.order import weighted, weights_of
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.simulate import Costs, Span, Timeline, peak_in_flight
from pipeline_engine.plan.values import Value, channel_of

Spans = tuple[tuple[Span, ...], ...]


def _weights(weights: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(weight) for weight in weights)


def _spans(ranks: Iterable[Iterable[Span]]) -> Spans:
    return tuple(tuple(spans) for spans in ranks)


@frozen
class Trace:
    """One recorded call of a pipeline.

    Args:
        schedule: what was to be done, computing verbs only.
        weights: relative cost of each microbatch, by place in the schedule; empty means 1 for each.
        spans: for each rank all that it did, in order and in all ten verbs; seconds, on one clock.

    Raises:
        ScheduleError: the numbers of ranks or of weights do not fit the schedule.
    """

    schedule: Schedule
    weights: tuple[float, ...] = field(converter=_weights)
    spans: Spans = field(converter=_spans)

    def __attrs_post_init__(self) -> None:
        weights_of(weighted(Costs(), self.weights), self.schedule.num_microbatches)
        if len(self.spans) != self.schedule.graph.num_ranks:
            raise ScheduleError(
                f"spans of {len(self.spans)} ranks are given for {self.schedule.graph.num_ranks} ranks."
            )

    @property
    def timeline(self) -> Timeline:
        """The same as a simulation gives: computing actions and yields, from second 0 on.

        A yield lasts until the next action of its rank: in between runs the caller's code.
        """
        first = min((spans[0].start for spans in self.spans if spans), default=0.0)
        return timeline_of([_shown(spans, first) for spans in self.spans])

    def costs(self) -> Costs:
        """What a simulation must be told so that it gives what was measured.

        Stages cost what they took on the average per unit of weight.  A backward that was never split counts half to
        each half.  Latencies are by kind of value: the median over messages that were waited for when they were sent,
        and 0 if there were none.  They include the engine's work on a message.
        """
        stages = range(self.schedule.graph.num_stages)
        rates = self._rates()
        halves = [(rates.get((Backward, stage), 0.0) / 2) for stage in stages]
        losses = [span.end - span.start for spans in self.timeline.spans for span in spans if _is_yield(span)]
        costs = Costs(
            forward=[rates.get((Forward, stage), 0.0) for stage in stages],
            backward_input=[rates.get((BackwardInput, stage), halves[stage]) for stage in stages],
            backward_weight=[rates.get((BackwardWeight, stage), halves[stage]) for stage in stages],
            loss=median(losses) if losses else 0.0,
            latency=self._latencies(),
        )
        return weighted(costs, self.weights)

    def _rates(self) -> dict[tuple[type[Compute], int], float]:
        """Seconds per unit of weight, by verb and stage."""
        seconds: defaultdict[tuple[type[Compute], int], float] = defaultdict(float)
        weight: defaultdict[tuple[type[Compute], int], float] = defaultdict(float)
        for action, span in self._computing():
            seconds[type(action), action.stage] += span.end - span.start
            weight[type(action), action.stage] += self.weights[action.microbatch] if self.weights else 1.0
        return {key: seconds[key] / weight[key] for key in seconds}

    def _computing(self) -> Iterable[tuple[Compute, Span]]:
        for spans in self.spans:
            for span in spans:
                if isinstance(span.action, COMPUTE):
                    yield span.action, span

    def _latencies(self) -> dict[str, float]:
        """Seconds by kind of value: the median over the messages that were waited for."""
        ready = self._ready()
        delays: defaultdict[str, list[float]] = defaultdict(list)
        for rank, spans in enumerate(self.spans):
            for span in spans:
                if isinstance(span.action, WaitRecv):
                    value, source = span.action.value, span.action.from_rank
                    if span.start <= ready.get((value, source, rank), -math.inf) < span.end:
                        kind = channel_of(value, source, rank).name.rstrip("0123456789")
                        delays[kind].append(span.end - ready[value, source, rank])
        return {kind: median(each) for kind, each in delays.items()}

    def _ready(self) -> dict[tuple[Value, int, int], float]:
        """When each message was both sent and posted."""
        sent: dict[tuple[Value, int, int], float] = {}
        posted: dict[tuple[Value, int, int], float] = {}
        for rank, spans in enumerate(self.spans):
            for span in spans:
                match span.action:
                    case Send(value, target):
                        sent[value, rank, target] = span.start
                    case PostRecv(value, source):
                        posted[value, source, rank] = span.start
        return {message: max(sent[message], posted[message]) for message in sent.keys() & posted.keys()}


def timeline_of(ranks: Sequence[Sequence[Span]]) -> Timeline:
    """The timeline with these computing actions and yields."""
    makespan = max((span.end for spans in ranks for span in spans), default=0.0)
    busy = sum(span.end - span.start for spans in ranks for span in spans)
    available = len(ranks) * makespan
    return Timeline(
        spans=_spans(ranks),
        makespan=makespan,
        bubble=1.0 - busy / available if available else 0.0,
        peak_in_flight=tuple(peak_in_flight(tuple(span.action for span in spans)) for spans in ranks),
    )


def _is_yield(span: Span) -> bool:
    return isinstance(span.action, Yield)


def _shown(spans: Sequence[Span], first: float) -> list[Span]:
    shown = []
    for place, span in enumerate(spans):
        end = span.end
        if _is_yield(span) and place + 1 < len(spans):
            end = spans[place + 1].start
        if isinstance(span.action, (*COMPUTE, Yield)):
            shown.append(Span(span.action, span.start - first, end - first))
    return shown
