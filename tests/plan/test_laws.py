"""Counter-examples are as short as they can be, and a plan too large to hold is checked while it is generated."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.plan.actions import Action, Compute, Forward, PostRecv, Program, Publish, Send, WaitSend, Yield
from pipeline_engine.plan.check import check_computing
from pipeline_engine.plan.laws.deadlock import Stuck, circle
from pipeline_engine.plan.schedules import generate
from pipeline_engine.plan.values import Activation
from tests.plan.graphs import graphs
from tests.strategies import chain_for, schedules


def refused(schedule: pe.Schedule) -> list[str]:
    with pytest.raises(pe.ScheduleError) as caught:
        pe.check(schedule)
    return str(caught.value).splitlines()


def with_program(schedule: pe.Schedule, rank: int, program: list[Action]) -> pe.Schedule:
    programs: list[Program] = list(schedule.programs)
    programs[rank] = tuple(program)
    return evolve(schedule, programs=programs)


def test_of_eight_ranks_that_stand_still_only_the_two_that_wait_for_each_other_are_shown() -> None:
    graph = chain_for("1f1b", 8)
    text = pe.build("1f1b", graph, 4).to_text()
    assert "4F0 4F1 4F2 4F3 4B0" in text
    knotted = pe.Schedule.from_text(text.replace("4F0 4F1 4F2 4F3 4B0", "4F0 4B0 4F1 4F2 4F3"), graph, "knotted")
    assert refused(knotted) == [
        "schedule 'knotted' deadlocks:",
        "rank 4 step 1   4B0   waits for dx[5,0]",
        "rank 5 step 1   5F1   waits for x[4,1]",
    ]


def test_a_circle_of_three_is_shown_whole_and_those_that_wait_for_it_are_not() -> None:
    def stuck(on: int) -> Stuck:
        return Stuck(0, Forward(0, 0), "something", on)

    assert circle({0: stuck(1), 1: stuck(3), 2: stuck(0), 3: stuck(4), 4: stuck(1)}) == [1, 3, 4]
    assert circle({0: stuck(1), 1: stuck(2), 2: stuck(7)}) == [2], "rank 7 has come to its end"
    assert circle({0: stuck(1), 1: stuck(0), 2: stuck(2)}) == [2], "the shortest one"


def moved(program: list[Action], action: Action, after: Action) -> None:
    program.remove(action)
    program.insert(program.index(after) + 1, action)


def test_two_ranks_that_both_send_before_they_post() -> None:
    lowered = pe.lower(pe.build("zb-v", chain_for("zb-v", 2), 2))
    down, up = (Activation(0, 1), 0, 1), (Activation(2, 0), 1, 0)
    for (value, rank, peer), (other, _, _) in ((down, up), (up, down)):
        program = list(lowered.programs[rank])
        moved(program, WaitSend(value, peer), after=Send(value, peer))
        moved(program, PostRecv(other, peer), after=WaitSend(value, peer))
        lowered = with_program(lowered, rank, program)
    first, *lines = refused(lowered)
    assert first == "schedule 'zb-v' deadlocks:"
    assert [line.partition("   ")[2] for line in lines] == [
        "sent:x[0,1]>1   waits for rank 1 to post x[0,1]",
        "sent:x[2,0]>0   waits for rank 0 to post x[2,0]",
    ]


def test_a_value_is_read_as_often_as_its_lifetime_says() -> None:
    """A second publish reads what the first one has freed; one that is left out keeps the value for ever."""
    lowered = pe.lower(pe.build("gpipe", chain_for("gpipe", 1), 1))
    twice = [action for action in lowered.programs[0] for _ in range(1 + isinstance(action, Publish))]
    assert refused(with_program(lowered, 0, twice)) == [
        "rank 0 step 2   publish:y[0]: what it reads was freed; a value is freed once, after its last use."
    ]
    graph = pe.StageGraph([(0, 1), (1, 2), (0, 2)], [0, 1, 1])
    taken_twice = pe.lower(pe.build("gpipe", graph, 1))
    unlinked = evolve(taken_twice, graph=pe.StageGraph([(0, 1), (1, 2)], [0, 1, 1]))
    assert refused(unlinked)


@given(schedules(max_ranks=5), st.booleans())
def test_all_traffic_of_a_pair_of_ranks_has_one_order_so_a_transport_needs_no_tags(
    schedule: pe.Schedule, hand_out: bool
) -> None:
    pe.check(pe.lower(schedule, hand_out=hand_out), tells_channels_apart=False)


def test_a_transport_without_tags_asks_for_more() -> None:
    """Two channels of one pair, posted in another order than sent: lawful with tags, refused without."""
    lowered = pe.lower(pe.build("interleaved", chain_for("interleaved", 2), 5))
    program = list(lowered.programs[0])
    place = next(
        first
        for first, (action, other) in enumerate(pairwise(program))
        if isinstance(action, PostRecv) and isinstance(other, PostRecv) and type(action.value) is not type(other.value)
    )
    program[place], program[place + 1] = program[place + 1], program[place]
    swapped = with_program(lowered, 0, program)
    pe.check(swapped)
    with pytest.raises(pe.ScheduleError, match=r"message \d+ is sent as .* and received as .*; sends and receives"):
        pe.check(swapped, tells_channels_apart=False)


@settings(max_examples=40)
@given(st.sampled_from(sorted(pe.SCHEDULES)), st.integers(1, 6), st.integers(0, 13))
def test_a_generated_plan_is_checked_while_it_is_read(name: str, ranks: int, m: int) -> None:
    graph = chain_for(name, ranks)
    assert [tuple(program) for program in generate(name, graph, m)] == list(pe.build(name, graph, m).programs)
    check_computing(name, graph, m, generate(name, graph, m))


def test_a_plan_is_read_no_further_than_it_can_be_performed() -> None:
    """Rank 0 of 1F1B holds four activations; a reader that ran ahead of its peers would hold more."""
    graph, read = chain_for("1f1b", 4), [0] * 4

    def counted(rank: int, program: Iterator[Compute]) -> Iterator[Compute]:
        for action in program:
            read[rank] += 1
            assert rank == 3 or read[rank] <= read[3] + 2 * 4
            yield action

    check_computing("1f1b", graph, 40, [counted(*each) for each in enumerate(generate("1f1b", graph, 40))])
    assert read == [80] * 4


def test_a_missing_action_is_told_rather_than_the_deadlock_that_it_causes() -> None:
    text = pe.build("1f1b", chain_for("1f1b", 3), 3).to_text().replace("1F1 ", "")
    assert refused(pe.Schedule.from_text(text, chain_for("1f1b", 3))) == [
        "1F1 is missing; every forward is performed exactly once."
    ]


@settings(max_examples=40)
@given(graphs(), st.integers(0, 5), st.booleans())
def test_what_is_lowered_on_any_graph_is_lawful_with_and_without_handing_out(
    graph: pe.StageGraph, m: int, hand_out: bool
) -> None:
    lowered = pe.lower(pe.build("gpipe", graph, m), hand_out=hand_out)
    pe.check(lowered)
    ranks = {rank for rank, program in enumerate(lowered.programs) if any(isinstance(a, Yield) for a in program)}
    assert ranks == (set(range(graph.num_ranks) if hand_out else [graph.rank_of[-1]]) if m else set())
