"""Check refuses what is unlawful, with a counter-example; what the registry builds is lawful in every size."""

from __future__ import annotations

import re

import pytest
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.plan.actions import (
    BACKWARD,
    COMPUTE,
    Action,
    Backward,
    Forward,
    PostRecv,
    Program,
    Publish,
    Send,
    WaitRecv,
    WaitSend,
    Yield,
)
from pipeline_engine.plan.values import Activation, InputGrad
from tests.strategies import schedules

GRAPH = pe.StageGraph.chain(3, 3)
LAWFUL = pe.lower(pe.build("1f1b", GRAPH, 4))


def changed(schedule: pe.Schedule, rank: int, program: list[Action]) -> pe.Schedule:
    programs: list[Program] = list(schedule.programs)
    programs[rank] = tuple(program)
    return evolve(schedule, programs=programs)


def refused(schedule: pe.Schedule, words: str = ".") -> str:
    with pytest.raises(pe.ScheduleError, match=words) as caught:
        pe.check(schedule)
    message = str(caught.value)
    assert re.search(r"rank|channel|stage|\d[FBIW]\d", message), f"no counter-example in {message!r}"
    assert len(message.splitlines()) <= 1 + schedule.graph.num_ranks
    return message


@given(schedules())
def test_every_schedule_of_the_registry_is_lawful(schedule: pe.Schedule) -> None:
    pe.check(schedule)


@given(schedules(), st.booleans(), st.booleans())
def test_every_lowered_schedule_is_lawful(schedule: pe.Schedule, hand_out: bool, forward_only: bool) -> None:
    assume(hand_out or not forward_only)  # the closed loop of a forward is a stream that nobody looks at
    pe.check(pe.lower(schedule, hand_out=hand_out, forward_only=forward_only))


@st.composite
def places(draw: st.DrawFn) -> tuple[pe.Schedule, int, int]:
    """A lowered schedule, and a place in it."""
    lowered = pe.lower(draw(schedules(max_ranks=4, min_microbatches=1, max_microbatches=6)))
    rank = draw(st.integers(0, lowered.graph.num_ranks - 1))
    return lowered, rank, draw(st.integers(0, len(lowered.programs[rank]) - 1))


@given(places())
def test_dropping_any_action_is_refused(place: tuple[pe.Schedule, int, int]) -> None:
    schedule, rank, step = place
    program = list(schedule.programs[rank])
    del program[step]
    mutated = changed(schedule, rank, program)
    assume(any(isinstance(action, Backward) for each in mutated.programs for action in each))  # forward only is lawful
    refused(mutated)


@given(places(), st.data())
def test_doing_any_action_twice_is_refused(place: tuple[pe.Schedule, int, int], data: st.DataObject) -> None:
    schedule, rank, step = place
    program = list(schedule.programs[rank])
    program.insert(data.draw(st.integers(0, len(program))), program[step])
    refused(changed(schedule, rank, program))


@given(places(), st.data())
def test_doing_any_action_on_another_rank_is_refused(place: tuple[pe.Schedule, int, int], data: st.DataObject) -> None:
    schedule, rank, step = place
    assume(schedule.graph.num_ranks > 1)
    other = data.draw(st.integers(0, schedule.graph.num_ranks - 1).filter(lambda each: each != rank))
    program, receiving = list(schedule.programs[rank]), list(schedule.programs[other])
    receiving.insert(data.draw(st.integers(0, len(receiving))), program.pop(step))
    refused(changed(changed(schedule, rank, program), other, receiving))


def with_number(action: Action, number: int) -> Action:
    match action:
        case Send(value, _) | WaitSend(value, _) | PostRecv(value, _) | WaitRecv(value, _):
            return evolve(action, value=evolve(value, microbatch=number))
        case _:
            return evolve(action, microbatch=number)


@given(places(), st.integers(0, 9))
def test_any_action_on_another_microbatch_is_refused(place: tuple[pe.Schedule, int, int], number: int) -> None:
    schedule, rank, step = place
    program = list(schedule.programs[rank])
    mutated = with_number(program[step], number)
    assume(mutated != program[step])
    program[step] = mutated
    refused(changed(schedule, rank, program))


@given(places(), st.integers(0, 9))
def test_a_message_to_or_from_another_rank_is_refused(place: tuple[pe.Schedule, int, int], peer: int) -> None:
    schedule, rank, step = place
    program = list(schedule.programs[rank])
    action = program[step]
    match action:
        case Send(value, _) | WaitSend(value, _):
            mutated: Action = type(action)(value, peer)
        case PostRecv(value, _) | WaitRecv(value, _):
            mutated = type(action)(value, peer)
        case _:
            assume(False)
    assume(mutated != action)
    program[step] = mutated
    refused(changed(schedule, rank, program))


@given(places(), st.data())
def test_an_action_before_what_it_needs_is_refused(place: tuple[pe.Schedule, int, int], data: st.DataObject) -> None:
    """Of one value on one rank: made, then sent, then waited for; posted, then received, then used."""
    schedule, rank, step = place
    program = list(schedule.programs[rank])
    first = program[step]
    later = {
        Forward: lambda a: isinstance(a, BACKWARD) and (a.stage, a.microbatch) == (first.stage, first.microbatch),
        PostRecv: lambda a: isinstance(a, WaitRecv) and a.value == first.value,
        Send: lambda a: isinstance(a, WaitSend) and a.value == first.value,
        Publish: lambda a: isinstance(a, Yield) and a.microbatch == first.microbatch,
    }.get(type(first))
    assume(later is not None)
    assert later is not None
    place_of_later = next(position for position, action in enumerate(program) if later(action))
    program[step], program[place_of_later] = program[place_of_later], program[step]
    refused(changed(schedule, rank, program))


def test_swapping_a_forward_with_its_backward_is_reported_as_a_deadlock() -> None:
    """Ranks 0 and 1 wait too, but only for rank 2, which waits for itself."""
    text = pe.build("1f1b", GRAPH, 2).to_text().replace("2F0 2B0", "2B0 2F0")
    message = refused(pe.Schedule.from_text(text, GRAPH, "backwards"))
    assert message.splitlines() == [
        "schedule 'backwards' deadlocks:",
        "rank 2 step 0   2B0   waits for x[2,0]",
    ]


def test_swapping_two_sends_of_a_channel_is_refused() -> None:
    program = list(LAWFUL.programs[0])
    first, second = [step for step, action in enumerate(program) if isinstance(action, Send)][:2]
    program[first], program[second] = program[second], program[first]
    refused(changed(LAWFUL, 0, program))


def test_a_receive_posted_in_another_order_than_the_sends_is_refused() -> None:
    program = list(LAWFUL.programs[1])
    posts = [step for step, action in enumerate(program) if str(action).startswith("post:x")]
    for post in posts[:2]:
        program.insert(0, program.pop(post))
    refused(
        changed(LAWFUL, 1, program), "channel x0:0>1: message 0 is sent as x.0,0. and received as x.0,1.; sends and"
    )


def test_a_receive_posted_after_its_sender_waits_for_it_deadlocks() -> None:
    """Each rank sends, waits until that has left, and only then posts what the other one sends."""
    programs = pe.lower(pe.build("1f1b", pe.StageGraph.chain(2, 2), 2))
    sender, receiver = list(programs.programs[0]), list(programs.programs[1])
    x, dx = Activation(0, 1), InputGrad(1, 0)
    sender.remove(WaitSend(x, 1))
    sender.insert(sender.index(Send(x, 1)) + 1, WaitSend(x, 1))
    sender.remove(PostRecv(dx, 1))
    sender.insert(sender.index(WaitSend(x, 1)) + 1, PostRecv(dx, 1))
    receiver.remove(WaitSend(dx, 0))
    receiver.insert(receiver.index(Send(dx, 0)) + 1, WaitSend(dx, 0))
    receiver.remove(PostRecv(x, 0))
    receiver.insert(receiver.index(WaitSend(dx, 0)) + 1, PostRecv(x, 0))
    assert "waits for rank 1 to post x[0,1]" in refused(
        changed(changed(programs, 0, sender), 1, receiver), "deadlocks:"
    )


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("0F1", "0F0", "0F0 is performed 2 times; every action is performed exactly once"),
        ("0F1", "0F9", "rank 0 step 1   0F9: microbatches run 0..1"),
        ("0F1", "9F1", "rank 0 step 1   9F1: stages run 0..2"),
        ("0F1", "1F1", "rank 0 step 1   1F1: stage 1 is owned by rank 1"),
        ("0F1", "", "0F1 is missing; every forward is performed exactly once"),
        ("0B1", "", "stage 0, microbatch 1: 0 x B, 0 x I, 0 x W; a backward is performed once"),
        ("0B1", "0I1", "stage 0, microbatch 1: 0 x B, 1 x I, 0 x W; a backward is performed once"),
        ("0B1", "0B1 0I1 0W1", "stage 0, microbatch 1: 1 x B, 1 x I, 1 x W"),
        ("0B0 0B1", "0W0 0I0 0B1", "rank 0 step 2   0W0   waits for dx.0,0."),
    ],
)
def test_each_law_of_the_computing_verbs_names_its_counter_example(old: str, new: str, words: str) -> None:
    text = pe.build("1f1b", GRAPH, 2).to_text()
    assert old in text
    schedule = pe.Schedule.from_text(text.replace(old, new), GRAPH)
    refused(evolve(schedule, num_microbatches=2), words)


def test_a_split_backward_is_lawful() -> None:
    text = "0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1I0 1F1 1I1 1W0 1W1"
    pe.check(pe.Schedule.from_text(text, pe.StageGraph.chain(2, 2)))


def test_two_schedules_that_wait_for_each_other_show_every_rank() -> None:
    text = "0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"
    message = refused(pe.Schedule.from_text(text, pe.StageGraph.chain(2, 2), "crossed"))
    assert message.splitlines()[1:] == [
        "rank 0 step 1   0B0   waits for dx[1,0]",
        "rank 1 step 1   1F1   waits for x[0,1]",
    ]


def test_a_receive_that_hangs_on_the_callers_code_is_refused() -> None:
    """Law 8: a receive posted before a yield, whose send comes after it."""
    programs = pe.lower(pe.build("gpipe", pe.StageGraph.chain(2, 2), 1))
    program = list(programs.programs[0])
    post = next(step for step, action in enumerate(program) if str(action).startswith("post:dx"))
    program.insert(program.index(Yield(0)), program.pop(post))
    words = "rank 0 step .*yield:y.0.: the receive of dx.1,0. is outstanding and rank 1 sends it only later"
    refused(changed(programs, 0, program), words)


def test_yields_in_two_orders_are_refused() -> None:
    programs = pe.lower(pe.build("gpipe", GRAPH, 2), forward_only=True)
    swapped = [Yield(1 - a.microbatch) if isinstance(a, Yield) else a for a in programs.programs[2]]
    refused(changed(programs, 2, [*swapped]), "yield:y")


def test_checking_a_lowered_schedule_checks_what_was_lowered() -> None:
    assert all(any(isinstance(action, COMPUTE) for action in program) for program in LAWFUL.programs)
    pe.check(LAWFUL)
