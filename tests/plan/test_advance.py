"""The replica under every caller: never stuck, nothing lost, and each batch ends on its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.plan.actions import (
    BACKWARD,
    COMPUTE,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Yield,
)
from pipeline_engine.plan.advance import Replica, canonical_batches
from pipeline_engine.plan.transfers import Batch
from tests.oracles.rendezvous import Rendezvous
from tests.strategies import Ask, Event, Finish, Give, Skip, histories, one_by_one, schedules


class Play:
    """A caller's history on a replica; every batch is performed by the oracle's machine before the next event."""

    def __init__(self, schedule: pe.Schedule, *, forward_only: bool = False) -> None:
        self.replica = Replica(schedule, forward_only=forward_only)
        self.machine = Rendezvous(schedule.graph)
        self.batches: list[Batch] = []
        self.given: set[int] = set()
        self.skipped: set[int] = set()

    def perform(self, batch: Batch) -> Batch:
        self.machine.given = set(self.given)
        self.machine.perform(batch)
        self.batches.append(batch)
        return batch

    def event(self, event: Event) -> None:
        match event:
            case Ask(microbatch):
                batch = self.perform(self.replica.ask(microbatch))
                assert all(program[-1] == Yield(microbatch) for program in batch)
            case Give(microbatches):
                self.given |= set(microbatches)
                batch = self.perform(self.replica.give(microbatches))
                assert not any(isinstance(action, (Forward, Yield)) for program in batch for action in program)
            case Skip(microbatch):
                self.skipped.add(microbatch)
                self.replica.drop([microbatch])
            case Finish():
                self.perform(self.replica.finish())

    def end(self) -> None:
        self.perform(self.replica.close())
        self.dropped = self.replica.open
        self.replica.drop(self.dropped)
        self.perform(self.replica.drain())


def numbers_of(actions: list[Action], *verbs: type[Action]) -> list[int]:
    """Microbatches of the actions of these verbs, in order."""
    return [action.microbatch for action in actions if isinstance(action, verbs)]  # type: ignore[union-attr]


def by_stage(play: Play) -> list[list[Action]]:
    """For each stage what was performed of it."""
    everything = [action for performed in play.machine.performed for action in performed]
    stages = range(play.replica.graph.num_stages)
    return [[action for action in everything if action.stage == stage] for stage in stages]  # type: ignore[union-attr]


def computed_in(batch: Batch) -> set[int]:
    """Microbatches on which something is computed."""
    return {a.microbatch for program in batch for a in program if isinstance(a, COMPUTE)}


@st.composite
def schedules_with_histories(draw: st.DrawFn) -> tuple[pe.Schedule, tuple[Event, ...]]:
    schedule = draw(schedules())
    return schedule, draw(histories(schedule.num_microbatches))


@given(schedules_with_histories())
def test_whatever_the_caller_does_each_batch_ends_and_every_given_gradient_is_served(
    case: tuple[pe.Schedule, tuple[Event, ...]],
) -> None:
    schedule, events = case
    play = Play(schedule)
    for event in events:
        play.event(event)
    play.end()
    yielded = {event.microbatch for event in events if isinstance(event, Ask)}
    assert play.machine.is_silent()
    assert play.replica.is_done
    assert play.dropped == yielded - play.given - play.skipped
    for stage, performed in enumerate(by_stage(play)):
        forwards = numbers_of(performed, Forward)
        assert set(forwards) >= yielded and len(set(forwards)) == len(forwards)
        for half in (BackwardInput, BackwardWeight):
            assert sorted(numbers_of(performed, Backward, half)) == sorted(play.given), f"stage {stage}"


@given(schedules_with_histories())
def test_nothing_of_a_skipped_microbatch_is_computed_after_the_skip(
    case: tuple[pe.Schedule, tuple[Event, ...]],
) -> None:
    schedule, events = case
    play = Play(schedule)
    for event in events:
        play.event(event)
        if not isinstance(event, Skip):
            assert not computed_in(play.batches[-1]) & play.skipped
    play.end()
    for batch in play.batches[-2:]:
        assert computed_in(batch) <= play.given


@given(schedules_with_histories())
def test_on_a_straight_chain_all_ranks_run_their_backwards_in_one_order(
    case: tuple[pe.Schedule, tuple[Event, ...]],
) -> None:
    schedule, events = case
    play = Play(schedule)
    for event in events:
        play.event(event)
    play.end()
    if schedule.graph.is_straight:
        assert len({tuple(numbers_of(performed, *BACKWARD[:2])) for performed in play.machine.performed}) == 1


@given(schedules())
def test_a_caller_who_gives_at_once_runs_the_programs_as_they_are_written(schedule: pe.Schedule) -> None:
    play = Play(schedule)
    for event in one_by_one(schedule.num_microbatches):
        play.event(event)
    play.end()
    assert [tuple(performed) for performed in play.machine.performed] == list(schedule.programs)


@given(schedules(), st.booleans())
def test_forward_only_runs_each_forward_once_and_no_backward(schedule: pe.Schedule, leave_early: bool) -> None:
    play = Play(schedule, forward_only=True)
    asked = schedule.num_microbatches // 2 if leave_early else schedule.num_microbatches
    for microbatch in range(asked):
        play.event(Ask(microbatch))
    if not leave_early:
        play.event(Finish())
    play.end()
    for performed in by_stage(play):
        assert not numbers_of(performed, *BACKWARD)
        numbers = numbers_of(performed, Forward)
        assert numbers == list(range(len(numbers))) and asked <= len(numbers) <= schedule.num_microbatches


@given(schedules(min_microbatches=1))
def test_forward_only_runs_ahead_of_the_caller_no_further_than_training_does(schedule: pe.Schedule) -> None:
    play = Play(schedule, forward_only=True)
    play.event(Ask(0))
    training = Play(schedule)
    training.event(Ask(0))
    assert play.machine.performed == training.machine.performed


@given(schedules())
def test_the_closed_loop_is_the_program_in_one_batch(schedule: pe.Schedule) -> None:
    machine = Rendezvous(schedule.graph)
    machine.given = set(range(schedule.num_microbatches))
    (batch,) = canonical_batches(schedule, hand_out=False)
    machine.perform(batch)
    assert [tuple(performed) for performed in machine.performed] == list(schedule.programs)
    assert machine.is_silent()
    yields = [[action for action in program if isinstance(action, Yield)] for program in batch]
    last = schedule.graph.rank_of[schedule.graph.last_stage]
    assert yields.pop(last) == [Yield(microbatch) for microbatch in range(schedule.num_microbatches)]
    assert not any(yields)


@given(schedules_with_histories())
def test_two_ranks_that_saw_the_same_history_plan_the_same(case: tuple[pe.Schedule, tuple[Event, ...]]) -> None:
    schedule, events = case
    first, second = Play(schedule), Play(schedule)
    for play in (first, second):
        for event in events:
            play.event(event)
        play.end()
    assert first.batches == second.batches


@given(schedules_with_histories())
def test_a_call_may_be_drained_between_any_two_events_and_goes_on(case: tuple[pe.Schedule, tuple[Event, ...]]) -> None:
    """So another call can use the same channels in between, whatever order the gradients of this one come in."""
    schedule, events = case
    play = Play(schedule)
    for event in events:
        play.event(event)
        play.perform(play.replica.drain())
        assert play.machine.is_silent()
    play.end()
    assert play.machine.is_silent() and play.replica.is_done


@given(schedules(min_microbatches=1))
def test_no_output_is_asked_of_a_later_gradient(schedule: pe.Schedule) -> None:
    """With every gate closed the caller is handed every item, and then everything in one backward call."""
    play = Play(schedule)
    for microbatch in range(schedule.num_microbatches):
        play.event(Ask(microbatch))
    assert play.replica.open == set(range(schedule.num_microbatches))
    play.event(Give(tuple(range(schedule.num_microbatches))))
    play.event(Finish())
    assert play.replica.is_done and not play.replica.open


def test_a_program_that_cannot_reach_an_output_says_what_each_rank_waits_for() -> None:
    programs = pe.Schedule.from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", pe.StageGraph.chain(2, 2), "crossed")
    with pytest.raises(pe.ScheduleError) as caught:
        pe.lower(programs)
    assert str(caught.value).splitlines() == [
        "schedule 'crossed' cannot reach the output of microbatch 1:",
        "  rank 0   0B0   waits for dx[1,0]",
        "  rank 1   1F1   waits for x[0,1]",
    ]
    with pytest.raises(pe.ScheduleError, match="cannot reach its end:\n  rank 0   0B0   waits for"):
        pe.lower(programs, hand_out=False)
