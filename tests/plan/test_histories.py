"""The replica on any graph, for any rank, and when the caller changes his mind."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.plan.actions import (
    BACKWARD,
    COMPUTE,
    Action,
    Backward,
    BackwardWeight,
    Forward,
    PostRecv,
    Send,
    WaitRecv,
    WaitSend,
)
from pipeline_engine.plan.advance import Replica
from pipeline_engine.plan.transfers import Batch
from tests.oracles.rendezvous import Rendezvous
from tests.plan.graphs import graphs
from tests.strategies import Ask, Event, Finish, Give, Skip, chain_for, histories, schedules


def play(replica: Replica, events: tuple[Event, ...], *, to_the_end: bool = True) -> list[Batch]:
    """What every event of a caller adds."""
    batches = []
    for event in events:
        match event:
            case Ask(microbatch):
                batches.append(replica.ask(microbatch))
            case Give(microbatches):
                batches.append(replica.give(microbatches))
            case Skip(microbatch):
                replica.drop([microbatch])
            case Finish():
                batches.append(replica.finish())
    if to_the_end:
        batches.append(replica.close())
        replica.drop(replica.open)
        batches.append(replica.drain())
    return batches


@st.composite
def cases(draw: st.DrawFn, source: st.SearchStrategy[pe.Schedule]) -> tuple[pe.Schedule, tuple[Event, ...]]:
    schedule = draw(source)
    return schedule, draw(histories(schedule.num_microbatches))


@st.composite
def on_any_graph(draw: st.DrawFn) -> pe.Schedule:
    name = draw(st.sampled_from(sorted(pe.SCHEDULES)))
    rank_of = None if name == "gpipe" else chain_for(name, draw(st.integers(1, 4))).rank_of
    return pe.build(name, draw(graphs(rank_of=rank_of)), draw(st.integers(0, 7)))


@settings(max_examples=40)
@given(cases(on_any_graph()))
def test_on_any_graph_each_batch_ends_before_the_next_event_and_nothing_given_is_lost(
    case: tuple[pe.Schedule, tuple[Event, ...]],
) -> None:
    """The machine performs each batch of all ranks to its end: a caller with a barrier between any two events."""
    schedule, events = case
    machine = Rendezvous(schedule.graph)
    machine.given = {m for event in events if isinstance(event, Give) for m in event.microbatches}
    for batch in play(Replica(schedule), events):
        machine.perform(batch)
    assert machine.is_silent()
    for rank, performed in enumerate(machine.performed):
        done = Counter(action for action in performed if isinstance(action, BACKWARD))
        wanted = Counter(
            a for a in schedule.programs[rank] if isinstance(a, BACKWARD) and a.microbatch in machine.given
        )
        assert done == wanted


@settings(max_examples=40)
@given(cases(st.one_of(schedules(max_ranks=4), on_any_graph())), st.booleans())
def test_a_rank_that_asks_for_its_own_part_gets_what_it_would_get_among_all(
    case: tuple[pe.Schedule, tuple[Event, ...]], forward_only: bool
) -> None:
    schedule, events = case
    if forward_only:
        events = tuple(event for event in events if isinstance(event, (Ask, Finish)))
    among_all = play(Replica(schedule, forward_only=forward_only), events)
    for rank in range(schedule.graph.num_ranks):
        alone = play(Replica(schedule, forward_only=forward_only, rank=rank), events)
        assert [batch[rank] for batch in alone] == [batch[rank] for batch in among_all]
        assert not any(part for batch in alone for other, part in enumerate(batch) if other != rank)


@settings(max_examples=40)
@given(schedules(max_ranks=4))
def test_the_closed_loop_is_the_same_for_a_rank_alone(schedule: pe.Schedule) -> None:
    among_all = Replica(schedule, hand_out=False).run_closed()
    for rank, part in enumerate(among_all):
        assert Replica(schedule, hand_out=False, rank=rank).run_closed()[rank] == part


@settings(max_examples=40)
@given(on_any_graph())
def test_the_closed_loop_ends_on_any_graph(schedule: pe.Schedule) -> None:
    machine = Rendezvous(schedule.graph)
    machine.given = set(range(schedule.num_microbatches))
    machine.perform(Replica(schedule, hand_out=False).run_closed())
    assert machine.is_silent()
    assert [tuple(performed) for performed in machine.performed] == list(schedule.programs)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipe-v"])
@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 9), st.data())
def test_late_weight_parts_of_what_was_given_are_finished_when_the_caller_leaves(
    name: str, ranks: int, m: int, data: st.DataObject
) -> None:
    schedule = pe.build(name, chain_for(name, ranks), m)
    taken = data.draw(st.integers(0, m))
    events = tuple(each for k in range(taken) for each in (Ask(k), Give((k,))))
    batches = play(Replica(schedule), events)
    for rank, program in enumerate(schedule.programs):
        performed = [action for batch in batches for action in batch[rank] if isinstance(action, BACKWARD)]
        assert performed == [a for a in program if isinstance(a, BACKWARD) and a.microbatch < taken]
        weights = [action for action in performed if isinstance(action, (Backward, BackwardWeight))]
        assert len(weights) == taken * len(schedule.graph.stages_of(rank))


# Callers who change their mind.


def traffic(batches: list[Batch], verb: type[Action]) -> dict[tuple[int, int], list[Action]]:
    """For each ordered pair of ranks what is sent, or posted, in order."""
    by_pair: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for batch in batches:
        for rank, part in enumerate(batch):
            for action in part:
                if isinstance(action, Send) and verb is Send:
                    by_pair[rank, action.to_rank].append(action.value)
                elif isinstance(action, PostRecv) and verb is PostRecv:
                    by_pair[action.from_rank, rank].append(action.value)
    return dict(by_pair)


def check_traffic(batches: list[Batch]) -> None:
    """Each batch posts what is sent in it, on each ordered pair of ranks in one order; all is waited for in the end."""
    for batch in batches:
        assert traffic([batch], Send) == traffic([batch], PostRecv)
    counts = Counter(type(action) for batch in batches for part in batch for action in part)
    assert counts[Send] == counts[WaitSend] == counts[PostRecv] == counts[WaitRecv]


@settings(max_examples=40)
@given(schedules(max_ranks=4, min_microbatches=1), st.data())
def test_what_ran_ahead_of_a_change_of_state_runs_again(schedule: pe.Schedule, data: st.DataObject) -> None:
    m = schedule.num_microbatches
    at = data.draw(st.integers(0, m - 1))
    replica = Replica(schedule)
    before = play(replica, tuple(each for k in range(at) for each in (Ask(k), Give((k,)))), to_the_end=False)
    between = [replica.invalidate()]
    after = play(replica, (*(each for k in range(at, m) for each in (Ask(k), Give((k,)))), Finish()))
    check_traffic([*before, *between, *after])
    for rank, program in enumerate(schedule.programs):
        done = {action for batch in (*before, *between) for action in batch[rank]}
        given = {action for action in program if isinstance(action, BACKWARD) and action.microbatch < at}
        assert given <= done, "what was given is finished before the state changes"
        computed = [action for batch in after for action in batch[rank] if isinstance(action, COMPUTE)]
        forwards = {action.microbatch for action in computed if isinstance(action, Forward)}
        assert forwards == set(range(at, m)), "each forward whose output was not handed out runs under the new state"
        assert len(set(computed)) == len(computed)
        assert set(program) <= {a for batch in (*before, *between, *after) for a in batch[rank]}


@settings(max_examples=40)
@given(schedules(max_ranks=4, min_microbatches=1), st.data())
def test_a_retained_graph_gives_its_backwards_again(schedule: pe.Schedule, data: st.DataObject) -> None:
    m = schedule.num_microbatches
    replica = Replica(schedule)
    first = play(replica, (*(each for k in range(m) for each in (Ask(k), Give((k,)))), Finish()), to_the_end=False)
    again = data.draw(st.lists(st.integers(0, m - 1), min_size=1, unique=True))
    second = [replica.give_again(again)]
    check_traffic([*first, *second, *play(replica, ())])
    for rank, program in enumerate(schedule.programs):
        computed = [action for action in second[0][rank] if isinstance(action, COMPUTE)]
        assert computed == [a for a in program if isinstance(a, BACKWARD) and a.microbatch in again]


@settings(max_examples=40)
@given(schedules(max_ranks=4, min_microbatches=1), st.data())
def test_first_backwards_are_hurried_before_second_ones(schedule: pe.Schedule, data: st.DataObject) -> None:
    """Some are given while others are open, which may stand before them."""
    m = schedule.num_microbatches
    replica = Replica(schedule)
    some = data.draw(st.lists(st.integers(0, m - 1), min_size=1, unique=True))
    first = play(replica, (*(Ask(k) for k in range(m)), Give(tuple(some))), to_the_end=False)
    hurried, second = replica.hurry(some), replica.give_again(some)
    rest = tuple(set(range(m)) - set(some))
    check_traffic([*first, hurried, second, *play(replica, (Give(rest), Finish()) if rest else (Finish(),))])
    for rank, program in enumerate(schedule.programs):
        wanted = sorted(str(a) for a in program if isinstance(a, BACKWARD) and a.microbatch in some)
        performed = [a for batch in (*first, hurried) for a in batch[rank] if isinstance(a, BACKWARD)]
        assert sorted(map(str, performed)) == wanted
        assert sorted(str(a) for a in second[rank] if isinstance(a, BACKWARD)) == wanted


def test_a_second_backward_before_the_first_one_is_through_is_refused() -> None:
    replica = Replica(pe.build("zb-h1", chain_for("zb-h1", 2), 2))
    replica.ask(0)
    with pytest.raises(pe.ScheduleError, match=r"the backwards of microbatches \[0\] have not all been performed yet"):
        replica.give_again([0])
