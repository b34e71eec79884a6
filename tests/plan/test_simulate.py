"""The simulator's clock, on schedules small enough to draw."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.plan.actions import COMPUTE, Backward, BackwardInput, BackwardWeight, Forward, Yield, parse_action
from pipeline_engine.plan.simulate import peak_in_flight
from tests.strategies import schedules

PAIR = pe.StageGraph.chain(2, 2)
costs = st.integers(0, 9)


def spans(timeline: pe.Timeline, rank: int) -> list[tuple[str, float, float]]:
    computing = [span for span in timeline.spans[rank] if isinstance(span.action, COMPUTE)]
    return [(str(span.action), span.start, span.end) for span in computing]


def test_two_ranks_and_two_microbatches_drawn_by_hand() -> None:
    """0F0 0F1 ___ 0B0 0B0 ___ 0B1 0B1 over ___ 1F0 1B0 1B0 1F1 1B1 1B1."""
    timeline = pe.simulate(pe.build("1f1b", PAIR, 2), pe.Costs())
    assert spans(timeline, 0) == [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4, 6), ("0B1", 7, 9)]
    assert spans(timeline, 1) == [("1F0", 1, 2), ("1B0", 2, 4), ("1F1", 4, 5), ("1B1", 5, 7)]
    assert (timeline.makespan, timeline.peak_in_flight) == (9.0, (2, 1))
    assert timeline.bubble == pytest.approx(6 / 18)


def test_the_callers_loss_and_every_message_take_their_time() -> None:
    slow = pe.Costs(loss=0.5, latency=0.25, seconds_per_byte=0.01, num_bytes=25)
    timeline = pe.simulate(pe.build("gpipe", PAIR, 1), slow)
    assert spans(timeline, 1) == [("1F0", 1.5, 2.5), ("1B0", 3.0, 5.0)]
    assert spans(timeline, 0) == [("0F0", 0.0, 1.0), ("0B0", 5.5, 7.5)]


def test_costs_may_differ_by_stage_and_by_microbatch() -> None:
    uneven = pe.Costs(forward=(1, 2), backward_input=(3, 4), backward_weight=0, weights=(1, 10))
    timeline = pe.simulate(pe.build("gpipe", PAIR, 2), uneven)
    lengths = {name: end - start for rank in (0, 1) for name, start, end in spans(timeline, rank)}
    assert lengths == {"0F0": 1, "1F0": 2, "0F1": 10, "1F1": 20, "0B0": 3, "1B0": 4, "0B1": 30, "1B1": 40}


@given(schedules(), costs, costs, costs, costs, costs)
def test_a_clock_never_lies(schedule: pe.Schedule, f: int, b: int, w: int, loss: int, latency: int) -> None:
    """Nothing starts before what it needs has ended, no rank does two things at once, and idle plus busy is all."""
    cost = pe.Costs(forward=f, backward_input=b, backward_weight=w, loss=loss, latency=latency)
    timeline = pe.simulate(schedule, cost)
    ends = {span.action: span.end for rank in timeline.spans for span in rank if isinstance(span.action, COMPUTE)}
    last = schedule.graph.last_stage
    for rank in timeline.spans:
        assert all(earlier.end <= later.start for earlier, later in pairwise(rank))
        for span in rank:
            assert span.end - span.start == pytest.approx(cost.of(span.action))
            match span.action:
                case Forward(stage, m) if stage > 0:
                    assert span.start >= ends[Forward(stage - 1, m)] + latency * crosses(schedule.graph, stage - 1)
                case Backward(stage, m) | BackwardInput(stage, m) if stage < last:
                    after = ends.get(Backward(stage + 1, m), ends.get(BackwardInput(stage + 1, m)))
                    assert after is not None
                    assert span.start >= after + latency * crosses(schedule.graph, stage)
                case Yield(m):
                    assert span.start >= ends[Forward(last, m)]
    work = schedule.num_microbatches * ((f + b + w) * schedule.graph.num_stages / schedule.graph.num_ranks + loss)
    assert timeline.makespan >= work - 1e-6
    if timeline.makespan:
        assert timeline.bubble == pytest.approx(1 - work / timeline.makespan)


def crosses(graph: pe.StageGraph, stage: int) -> bool:
    """Whether the stage after this one is on another rank."""
    return graph.rank_of[stage] != graph.rank_of[stage + 1]


@given(schedules(min_microbatches=1))
def test_slower_messages_never_make_a_schedule_faster(schedule: pe.Schedule) -> None:
    spans = [pe.simulate(schedule, pe.Costs(latency=latency)).makespan for latency in (0, 0.5, 2)]
    assert spans == sorted(spans)


def test_an_activation_is_held_until_the_whole_of_its_backward_is_done() -> None:
    program = tuple(map(parse_action, ["0F0", "0F1", "0I0", "0I1", "0F2", "0W0", "0W1", "0I2", "0W2"]))
    assert peak_in_flight(program) == 3
    assert peak_in_flight(()) == 0


@given(schedules(min_microbatches=1))
def test_peaks_count_what_each_program_holds(schedule: pe.Schedule) -> None:
    timeline = pe.simulate(schedule, pe.Costs())
    for rank, program in enumerate(schedule.programs):
        steps = [isinstance(a, Forward) - isinstance(a, (Backward, BackwardWeight)) for a in program]
        held = accumulate(steps, initial=0)
        assert timeline.peak_in_flight[rank] == max(held)


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan"), (1.0, -1.0)])
@pytest.mark.parametrize("name", ["forward", "backward_input", "backward_weight"])
def test_a_cost_is_a_finite_number_of_seconds(name: str, seconds: Any) -> None:
    with pytest.raises(pe.ScheduleError, match=rf"Costs\.{name} is .*; a cost is a finite number of seconds"):
        pe.Costs(**{name: seconds})


def test_costs_that_do_not_cover_the_schedule_are_refused() -> None:
    schedule = pe.build("gpipe", PAIR, 2)
    with pytest.raises(pe.ScheduleError, match="costs are given for 1 stages, but there is a stage 1"):
        pe.simulate(schedule, pe.Costs(forward=(1.0,)))
    with pytest.raises(pe.ScheduleError, match="weights are given for 1 microbatches"):
        pe.simulate(schedule, pe.Costs(weights=(1.0,)))


def test_an_empty_call_takes_no_time() -> None:
    timeline = pe.simulate(pe.build("1f1b", PAIR, 0), pe.Costs())
    assert (timeline.makespan, timeline.bubble, timeline.peak_in_flight) == (0.0, 0.0, (0, 0))


def test_what_cannot_end_is_refused_and_not_simulated_for_ever() -> None:
    crossed = pe.Schedule.from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", PAIR, "crossed")
    with pytest.raises(pe.ScheduleError, match="'crossed'"):
        pe.simulate(crossed, pe.Costs())
