"""A run is recorded in the schedule's own actions, and its costs give the simulator what was measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.plan.actions import COMPUTE, WaitRecv, Yield
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.testing import run_ranks_in_threads
from tests.strategies import chain_for


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return grads[0], None, None


def sleeping(forward: float, backward: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A stage whose microbatch of n rows takes n times these seconds."""
    bias = torch.zeros(1, requires_grad=True)
    return lambda hidden: _Nap.apply(hidden + bias, forward * len(hidden), backward * len(hidden))  # type: ignore[no-untyped-call,no-any-return]


def batch(rows: Sequence[int]) -> list[pe.Microbatch]:
    return [pe.Microbatch(inputs=(torch.ones(n, 2),), weight=n) for n in rows]


def traced(name: str, ranks: int, rows: Sequence[int], seconds: Callable[[int], tuple[float, float]]) -> pe.Trace:
    """Run a stream and return its trace, the same on all ranks."""
    graph = chain_for(name, ranks)

    def on_rank(transport: Transport) -> pe.Trace:
        tracer = pe.Tracer()
        stages = {stage: sleeping(*seconds(stage)) for stage in graph.stages_of(transport.rank)}
        with pe.Pipeline(stages, graph=graph, schedule=name, transport=transport, tracer=tracer) as pipeline:
            for _ in range(2):  # the first one warms up
                for item in pipeline.stream(batch(rows)):
                    item.outputs.sum().backward()
                pipeline.flush()
            return tracer.gather(transport)

    first, *others = run_ranks_in_threads(on_rank, ranks)
    assert all(other == first for other in others)
    return first


def program_of(timeline: pe.Timeline) -> list[list[str]]:
    return [[str(span.action) for span in spans] for spans in timeline.spans]


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_a_sleeping_run_is_what_the_simulator_says_at_its_costs(name: str) -> None:
    """At most 3 % apart in makespan, and the same actions in the same order.

    Order and activations held are compared in every run, so no run may go wrong in what it does.  Of up to four
    makespans the best counts: stages that sleep can be late and never early, so other work on the machine only ever
    adds time, and what adds time in all four runs is the engine's own.  The simulator gets the run's own costs, in
    which late sleeps are contained; a makespan below its figure would be a wrong simulator, and counts as apart too.
    """
    apart = []
    while len(apart) < 4 and min(apart, default=1.0) > 0.03:
        trace = traced(name, 4, [1] * 6, lambda stage: (0.05, 0.1))
        simulated = pe.simulate(trace.schedule, trace.costs())
        assert program_of(trace.timeline) == program_of(simulated)
        assert trace.timeline.peak_in_flight == simulated.peak_in_flight
        apart.append(abs(trace.timeline.makespan / simulated.makespan - 1.0))
    assert min(apart) <= 0.03, apart


def test_costs_are_per_stage_and_per_unit_of_weight() -> None:
    costs = traced("1f1b", 2, [1, 3, 2], lambda stage: (0.02 * (stage + 1), 0.04)).costs()
    assert costs.weights == (1, 3, 2)
    assert costs.forward == pytest.approx((0.02, 0.04), rel=0.3)
    assert isinstance(costs.backward_input, tuple) and isinstance(costs.backward_weight, tuple)
    whole = [first + second for first, second in zip(costs.backward_input, costs.backward_weight, strict=True)]
    assert whole == pytest.approx((0.04, 0.04), rel=0.3)
    assert all(seconds < 0.02 for _, seconds in costs.latency)


def test_everything_that_a_rank_did_is_in_the_trace() -> None:
    trace = traced("1f1b", 2, [1, 1], lambda stage: (0.0, 0.0))
    lowered = pe.lower(trace.schedule)
    for spans, program in zip(trace.spans, lowered.programs, strict=True):
        assert sorted(str(span.action) for span in spans) == sorted(map(str, program))
        assert all(span.start <= span.end for span in spans)


def test_a_trace_survives_json() -> None:
    trace = traced("1f1b", 2, [2, 1], lambda stage: (0.0, 0.0))
    assert pe.from_json(pe.as_json(trace)) == trace


def test_the_report_names_the_slowest_stage_and_where_the_time_went() -> None:
    trace = traced("1f1b", 3, [1] * 6, lambda stage: (0.04, 0.04) if stage == 1 else (0.01, 0.02))
    report = pe.report(trace)
    assert "stage 1 (rank 1) is" in report.advice[0] and "x the mean" in report.advice[0]
    for share in report.shares:
        assert share.compute + share.caller + share.idle == pytest.approx(report.makespan)
    assert report.shares[1].idle == min(share.idle for share in report.shares)
    text = str(report)
    assert all(word in text for word in ("idle", "fill", "imbalance", "rank 2", report.advice[0]))


def test_advice_says_what_an_order_and_more_in_flight_would_win() -> None:
    """Costs that no machine has to sleep for: a trace is data."""
    weights = (9.0, 1.0, 8.0, 1.0, 7.0, 2.0, 6.0, 1.0)
    schedule = pe.build("1f1b", pe.StageGraph.chain(4, 4), 8)
    timeline = pe.simulate(schedule, pe.Costs(weights=weights))
    (order,) = pe.report(pe.Trace(schedule, weights, timeline.spans)).advice[:1]
    assert 'order="planned" is expected to take' in order
    even = pe.simulate(schedule, pe.Costs(latency=0.3))
    spans = [[*spans] for spans in even.spans]
    trace = pe.Trace(schedule, (), with_messages(pe.lower(schedule), spans, latency=0.3))
    assert dict(trace.costs().latency) == pytest.approx({"x": 0.3, "dx": 0.3, "y": 0.3})  # type: ignore[arg-type]
    advice = pe.report(trace).advice[-1]
    assert "waits" in advice and "for latency: with max_in_flight=" in advice and "instead of 4" in advice


def with_messages(lowered: pe.Schedule, ranks: list[list[Any]], latency: float) -> list[list[Any]]:
    """What a tracer would have recorded of messages: they take no time but that of the waits."""
    span_type = type(ranks[0][0])
    recorded = []
    for program, spans in zip(lowered.programs, ranks, strict=True):
        left, now, whole = list(spans), 0.0, []
        for action in program:
            if isinstance(action, (*COMPUTE, Yield)):
                whole.append(left.pop(0))
                now = whole[-1].end
            else:
                waits = isinstance(action, WaitRecv) and left
                end = max(now, left[0].start) if waits else now
                whole.append(span_type(action, now, end))
                now = end
        recorded.append(whole)
    return recorded


def test_a_call_that_was_not_recorded_is_refused() -> None:
    def gather(transport: Transport) -> None:
        pe.Tracer().gather(transport)

    with pytest.raises(pe.UsageError, match="call -1 is not among the 0"):
        run_ranks_in_threads(gather, 1)


def test_without_a_tracer_nothing_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline_engine.run.tracing.Recording.around", None)

    def on_rank(transport: Transport) -> None:
        graph = pe.StageGraph.chain(1, 1)
        with pe.Pipeline({0: sleeping(0, 0)}, graph=graph, schedule="1f1b", transport=transport) as pipeline:
            pipeline.step(batch([1]), lambda outputs, index: outputs.sum())

    run_ranks_in_threads(on_rank, 1)


# The planned order, as the caller of a pipeline sees it.


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 4), st.lists(st.integers(1, 50), max_size=9))
def test_a_planned_order_changes_the_order_and_nothing_else(name: str, ranks: int, rows: list[int]) -> None:
    graph = chain_for(name, ranks)
    sums = [float(n * (n + 1)) for n in rows]
    data = [pe.Microbatch(inputs=(torch.full((n, 2), (n + 1) / 2),), weight=n) for n in rows]

    def on_rank(transport: Transport) -> tuple[list[int], list[float], list[float], list[float]]:
        stages = {stage: sleeping(0, 0) for stage in graph.stages_of(transport.rank)}
        with pe.Pipeline(stages, graph=graph, schedule=name, transport=transport, order="planned") as pipeline:
            items = [(item.index, float(item.outputs.detach().sum())) for item in pipeline.stream(data)]
            together = [float(output.detach().sum()) for output in pipeline.forward(data)]
            losses = pipeline.step(data, lambda outputs, index: outputs.sum() * (index + 1))
        return [i for i, _ in items], [total for _, total in sorted(items)], together, [float(loss) for loss in losses]

    planned = pe.plan_order(pe.build(name, graph, len(rows)), pe.Costs(weights=[float(n) for n in rows]))
    for order, streamed, together, losses in run_ranks_in_threads(on_rank, ranks):
        assert tuple(order) == planned
        assert streamed == together == sums
        assert losses == [total * (index + 1) for index, total in enumerate(sums)]


def test_a_planned_order_needs_a_sequence_and_a_known_word() -> None:
    def on_rank(transport: Transport, order: Any) -> None:
        graph = pe.StageGraph.chain(1, 1)
        with pe.Pipeline({0: torch.relu}, graph=graph, schedule="1f1b", transport=transport, order=order) as pipeline:
            list(pipeline.stream(iter(batch([1])), num_microbatches=1))

    with pytest.raises(pe.UsageError, match="needs every weight beforehand: pass a sequence, not a list_iterator"):
        run_ranks_in_threads(lambda transport: on_rank(transport, "planned"), 1)
    with pytest.raises(pe.UsageError, match="order is 'best'; one of 'given', 'planned'"):
        run_ranks_in_threads(lambda transport: on_rank(transport, "best"), 1)


def test_a_pipeline_holds_as_many_as_it_is_told() -> None:
    graph = pe.StageGraph.chain(2, 2)

    def on_rank(transport: Transport) -> pe.Trace:
        tracer, stages = pe.Tracer(), {transport.rank: sleeping(0, 0)}
        with pe.Pipeline(
            stages, graph=graph, schedule="1f1b", transport=transport, max_in_flight=4, tracer=tracer
        ) as pipeline:
            for item in pipeline.stream(batch([1] * 6)):
                item.outputs.sum().backward()
            pipeline.flush()
            return tracer.gather(transport)

    trace, _ = run_ranks_in_threads(on_rank, 2)
    assert trace.timeline.peak_in_flight == (4, 2)


def test_an_error_names_the_callers_number() -> None:
    def on_rank(transport: Transport) -> None:
        graph = pe.StageGraph.chain(2, 2)
        stages = {transport.rank: sleeping(0, 0)}
        with pe.Pipeline(stages, graph=graph, schedule="1f1b", transport=transport, order="planned") as pipeline:
            first = next(iter(pipeline.stream(batch([5, 1, 4]))))
            assert first.index == 1
            pipeline.skip(first)
            first.outputs.sum().backward()

    with pytest.raises(pe.UsageError, match="microbatch 1, which was skipped"):
        run_ranks_in_threads(on_rank, 2)


# Memory, counted by the stages themselves.


class _Counter:
    """Bytes that the graphs of one rank keep, now and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0


class _Holding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, counter: _Counter) -> torch.Tensor:
        ctx.counter, ctx.num_bytes = counter, hidden.nbytes
        counter.now += hidden.nbytes
        counter.most = max(counter.most, counter.now)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.counter.now -= ctx.num_bytes
        return grads[0], None


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=10), st.integers(2, 4), st.floats(1.0, 4.0))
def test_a_real_run_of_a_choice_keeps_within_the_budget(rows: list[int], ranks: int, slack: float) -> None:
    graph = pe.StageGraph.chain(ranks, ranks)
    row_bytes = 2 * 4
    budget = slack * max(rows) * row_bytes
    costs = pe.Costs(latency=0.1, weights=[float(n) for n in rows])
    choice = pe.best_schedule(
        graph, costs, memory_budget=budget, activation_bytes=row_bytes, schedules=["1f1b", "gpipe"]
    )
    data = batch(rows)

    def on_rank(transport: Transport) -> int:
        counter = _Counter()
        bias = torch.zeros(1, requires_grad=True)
        stage = {transport.rank: lambda hidden: _Holding.apply(hidden + bias, counter)}
        with pe.Pipeline(stage, graph=graph, schedule=choice.schedule, transport=transport) as pipeline:
            for item in pipeline.stream([data[m] for m in choice.order]):
                item.outputs.sum().backward()
        assert counter.now == 0
        return counter.most

    most = max(run_ranks_in_threads(on_rank, ranks))
    assert most == choice.peak_bytes <= budget
