"""What a simulation tells beyond the makespan: why ranks were idle, what was in flight, and what it all hangs on."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.plan.actions import COMPUTE
from pipeline_engine.plan.costs import Costs
from pipeline_engine.plan.timeline import Idle, Phases
from pipeline_engine.plan.values import Channel
from tests.strategies import chain_for, schedules

PAIR = pe.StageGraph.chain(2, 2)
seconds = st.floats(0, 5)


@st.composite
def uneven(draw: st.DrawFn) -> tuple[pe.Schedule, pe.Costs]:
    schedule = draw(schedules(max_ranks=5, min_microbatches=1))
    stages, m = schedule.graph.num_stages, schedule.num_microbatches
    per_stage = st.lists(seconds, min_size=stages, max_size=stages)
    weights = draw(st.lists(st.floats(0.1, 4), min_size=m, max_size=m))
    delays = {"x": draw(seconds), "dx": draw(seconds), "y": draw(seconds)}
    costs = pe.Costs(*(draw(per_stage) for _ in range(3)), loss=draw(seconds), latency=delays, weights=weights)
    return schedule, costs


@settings(max_examples=40)
@given(uneven())
def test_idle_and_busy_are_all_of_a_ranks_time(case: tuple[pe.Schedule, pe.Costs]) -> None:
    timeline = pe.simulate(*case)
    for spans, idle in zip(timeline.spans, timeline.idle, strict=True):
        busy = sum(span.end - span.start for span in spans)
        assert busy + idle.total == pytest.approx(timeline.makespan, abs=1e-6)
        assert min(idle.fill, idle.drain, idle.imbalance, idle.latency) >= 0
    total = sum(idle.total for idle in timeline.idle)
    if timeline.makespan:
        assert timeline.bubble == pytest.approx(total / (len(timeline.idle) * timeline.makespan), abs=1e-6)


@settings(max_examples=40)
@given(uneven())
def test_a_critical_path_is_unbroken_from_the_start_to_the_makespan(case: tuple[pe.Schedule, pe.Costs]) -> None:
    schedule, costs = case
    timeline = pe.simulate(schedule, costs)
    path = timeline.critical_path()
    assert path[0][1].start == 0 and path[-1][1].end == timeline.makespan
    for (_, before), (_, after) in pairwise(path):
        assert 0 <= after.start - before.end <= schedule.graph.num_ranks * costs.transfer + 1e-6
    if costs.transfer == 0:
        assert sum(span.end - span.start for _, span in path) == pytest.approx(timeline.makespan)


@settings(max_examples=40)
@given(uneven())
def test_what_is_in_flight_begins_and_ends_at_nothing_and_peaks_where_it_should(
    case: tuple[pe.Schedule, pe.Costs],
) -> None:
    timeline = pe.simulate(*case)
    for rank, peak in enumerate(timeline.peak_in_flight):
        steps = timeline.in_flight(rank)
        assert steps[0] == (0.0, 0) and steps[-1][1] == 0
        assert max(held for _, held in steps) == peak
        assert [time for time, _ in steps] == sorted(time for time, _ in steps)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_with_equal_costs_a_bubble_is_all_filling_and_draining(name: str, ranks: int) -> None:
    timeline = pe.simulate(pe.build(name, chain_for(name, ranks), 2 * ranks), pe.Costs())
    for rank, idle in enumerate(timeline.idle):
        assert (idle.imbalance, idle.latency) == (0.0, 0.0)
        assert idle.fill + idle.drain == 3 * (ranks - 1), rank


def test_each_cause_of_idleness_in_a_picture() -> None:
    """Each message takes half a second; rank 1 is twice as slow forwards, and rank 0 waits for it.

    rank 0   0F0 0F1 ... 0B0 0F2 . 0B1 .. 0B2
    rank 1   .. 1F0 1F0 1B0 1F1 1F1 1B1 1F2 1F2 1B2 ..
    """
    costs = pe.Costs(forward=(1, 2), backward_weight=0, latency={"x": 0.5, "dx": 0.5})
    timeline = pe.simulate(pe.build("1f1b", PAIR, 3), costs)
    assert timeline.makespan == 12
    assert timeline.idle == (Idle(fill=2.5, drain=2.0, latency=1.5), Idle(fill=1.0, drain=1.0, latency=1.0))


def test_a_rank_that_waits_for_a_long_microbatch_in_the_middle_was_not_balanced() -> None:
    timeline = pe.simulate(pe.build("1f1b", PAIR, 6), pe.Costs(forward=(1, 2)))
    assert timeline.idle[0].imbalance > 0 and timeline.idle[1].imbalance == 0


def test_messages_of_each_direction_and_channel_have_their_own_delay() -> None:
    schedule = pe.build("gpipe", PAIR, 1)
    there = pe.simulate(schedule, pe.Costs(latency={"x": 3}))
    back = pe.simulate(schedule, pe.Costs(latency={"dx1:1>0": 5}))
    both = pe.simulate(schedule, pe.Costs(seconds_per_byte=0.5, num_bytes={"x": 6, "dx": 10}))
    assert [timeline.makespan for timeline in (there, back, both)] == [6 + 3, 6 + 5, 6 + 8]


def test_a_channels_own_number_counts_before_that_of_its_kind_and_messages_grow_with_their_microbatch() -> None:
    costs = pe.Costs(latency={"x0:0>1": 1, "x": 2}, num_bytes=4, seconds_per_byte=0.5, weights=(1, 3))
    assert [costs.travel(Channel(0, 1, name)) for name in ("x0", "x7", "y")] == [(1, 2), (2, 2), (0, 2)]
    assert costs.transfer == 4
    schedule = pe.build("gpipe", PAIR, 2)
    timeline = pe.simulate(schedule, pe.Costs(num_bytes={"x": 4}, seconds_per_byte=0.5, weights=(1, 3)))
    starts = {str(span.action): span.start for span in timeline.spans[1] if isinstance(span.action, COMPUTE)}
    assert (starts["1F0"], starts["1F1"]) == (3, 10)


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["latency", "num_bytes"])
def test_a_wrong_number_names_its_channel(field: Any, number: float) -> None:
    with pytest.raises(pe.ScheduleError, match=rf"Costs.{field}\['dx'\] is .*; a cost is a finite number"):
        Costs(**{field: {"dx": number}})
    with pytest.raises(pe.ScheduleError, match=rf"Costs.{field} is .*; a cost is a finite number"):
        Costs(**{field: number})


def test_a_timeline_of_nothing_has_no_path_and_nothing_in_flight() -> None:
    timeline = pe.simulate(pe.build("1f1b", PAIR, 0), pe.Costs())
    assert timeline.critical_path() == [] and timeline.in_flight(0) == [(0.0, 0)]
    assert (timeline.makespan, timeline.bubble, timeline.idle) == (0.0, 0.0, (Idle(), Idle()))


def test_filling_ends_with_the_first_backward_and_draining_begins_after_the_last_forward() -> None:
    program = pe.build("1f1b", PAIR, 3).programs[0]
    causes = [Phases.of(program).cause(place) for place in range(len(program))]
    assert [str(action) for action in program] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]
    assert causes == ["fill"] * 3 + ["imbalance"] + ["drain"] * 2
    assert Phases.of(()) == Phases(first_backward=0, last_forward=-1)
