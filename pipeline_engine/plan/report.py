"""Report: where a run's time went, which stage is the slowest, and what would help, in numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from attrs import frozen

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.bubble import CAUSES, Shares, shares
from pipeline_engine.plan.limit import limit
from pipeline_engine.plan.order import in_order, plan_order
from pipeline_engine.plan.simulate import Costs, PerStage, simulate
from pipeline_engine.plan.trace import Trace

_WORTH_SAYING = 0.02  # share of the makespan that advice must win in the simulator
_UNEVEN = 1.1  # times the mean
_MUCH = 0.05  # share of the makespan


@frozen
class Report:
    """What a trace shows; ``str`` is the report to read.

    Attributes:
        makespan: seconds.
        bubble: share of all ranks' time in which neither a stage nor the caller's code ran.
        shares: for each rank where its time went, in seconds.
        stage_seconds: for each stage, forward and backward of a microbatch of weight 1.
        expected: makespan that the simulator gives for the trace's own costs; seconds.
        advice: sentences, the most useful first.
    """

    makespan: float
    bubble: float
    shares: tuple[Shares, ...]
    stage_seconds: tuple[float, ...]
    expected: float
    advice: tuple[str, ...]

    def __str__(self) -> str:
        total = self.makespan or math.inf
        lines = [
            f"{self.makespan:.4g} s, {self.bubble:.1%} idle; {self.expected:.4g} s by the simulator at the same costs",
            "         " + "".join(f"{cause:>10}" for cause in CAUSES),
        ]
        for rank, share in enumerate(self.shares):
            lines.append(f"rank {rank:<4}" + "".join(f"{getattr(share, cause) / total:>10.1%}" for cause in CAUSES))
        seconds = "  ".join(f"{stage}: {each:.4g}" for stage, each in enumerate(self.stage_seconds))
        lines.append(f"seconds per microbatch of weight 1, by stage   {seconds}")
        return "\n".join([*lines, *self.advice])


def report(trace: Trace) -> Report:
    """Read a trace.

    Args:
        trace: of one call, all ranks.

    Returns:
        the bubble by cause, seconds by stage, and advice with what the simulator expects of following it.
    """
    timeline, costs = trace.timeline, trace.costs()
    by_rank = shares(timeline, trace.schedule.graph)
    stage_seconds = tuple(_seconds(costs, stage) for stage in range(trace.schedule.graph.num_stages))
    expected = simulate(trace.schedule, costs).makespan
    idle = sum(share.idle for share in by_rank)
    return Report(
        makespan=timeline.makespan,
        bubble=idle / (len(by_rank) * timeline.makespan) if timeline.makespan else 0.0,
        shares=by_rank,
        stage_seconds=stage_seconds,
        expected=expected,
        advice=(
            *_on_stages(trace, stage_seconds),
            *_on_order(trace, costs, expected),
            *_on_flight(trace, costs, expected, by_rank, timeline.makespan),
        ),
    )


def _seconds(costs: Costs, stage: int) -> float:
    def at(cost: PerStage) -> float:
        return cost[stage] if isinstance(cost, tuple) else cost

    return at(costs.forward) + at(costs.backward_input) + at(costs.backward_weight)


def _on_stages(trace: Trace, stage_seconds: tuple[float, ...]) -> Iterator[str]:
    mean = sum(stage_seconds) / len(stage_seconds)
    slowest = max(range(len(stage_seconds)), key=stage_seconds.__getitem__)
    if stage_seconds[slowest] > _UNEVEN * mean:
        rank = trace.schedule.graph.rank_of[slowest]
        yield (
            f"stage {slowest} (rank {rank}) is {stage_seconds[slowest] / mean:.2f} x the mean: "
            "give it fewer layers; every other rank waits for it."
        )


def _on_order(trace: Trace, costs: Costs, expected: float) -> Iterator[str]:
    if len(set(trace.weights)) < 2:
        return
    ordered = simulate(trace.schedule, in_order(costs, plan_order(trace.schedule, costs))).makespan
    if ordered < (1 - _WORTH_SAYING) * expected:
        yield f'microbatches are uneven: order="planned" is expected to take {_from_to(expected, ordered)}.'


def _on_flight(
    trace: Trace, costs: Costs, expected: float, by_rank: tuple[Shares, ...], makespan: float
) -> Iterator[str]:
    held = max(trace.timeline.peak_in_flight)
    best, number = expected, held
    for more in range(held + 1, 2 * held + 1):
        try:
            seconds = simulate(limit(trace.schedule, more), costs).makespan
        except ScheduleError:
            continue
        if seconds < (1 - _WORTH_SAYING / 2) * best:
            best, number = seconds, more
    if best < (1 - _WORTH_SAYING) * expected:
        rank = max(range(len(by_rank)), key=lambda rank: by_rank[rank].latency)
        waits = by_rank[rank].latency / makespan
        cause = (
            f"rank {rank} waits {waits:.0%} of the time for latency" if waits >= _MUCH else "ranks wait for each other"
        )
        yield (
            f"{cause}: with max_in_flight={number} instead of {held} the step is expected to take "
            f"{_from_to(expected, best)}."
        )


def _from_to(before: float, after: float) -> str:
    return f"{after:.4g} s instead of {before:.4g} s ({1 - after / before:.0%} less)"
