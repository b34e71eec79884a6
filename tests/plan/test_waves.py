"""Waves: programs that grow while the caller plays, and what they come to when everything is known."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.plan import waves
from pipeline_engine.plan.actions import BACKWARD
from pipeline_engine.plan.timeline import peak_in_flight
from pipeline_engine.plan.transfers import Batch
from pipeline_engine.plan.waves import WavesReplica, in_waves
from tests.oracles.rendezvous import Rendezvous
from tests.strategies import chain_for, schedule_names

sizes = st.lists(st.integers(0, 4), max_size=6)


def test_the_picture_in_the_docstring() -> None:
    schedule = in_waves("1f1b", pe.StageGraph.chain(2, 2), [2, 2, 2])
    pictured = [line for line in (waves.__doc__ or "").splitlines() if "0F0" in line or "1F0" in line]
    assert schedule.to_text().splitlines() == [line.rpartition("   ")[2] for line in pictured]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 3, 9])
def test_waves_of_one_are_1f1b(ranks: int, count: int) -> None:
    graph = pe.StageGraph.chain(ranks, ranks)
    assert in_waves("1f1b", graph, [1] * count) == pe.build("1f1b", graph, count)


@pytest.mark.parametrize(("at_once", "makespan"), [(1, 8 * (4 + 3) * 3), (2, 138), (3, 114), (4, (8 * 4 + 3) * 3)])
def test_the_more_waves_at_once_the_smaller_the_bubble(at_once: int, makespan: float) -> None:
    schedule = in_waves("1f1b", pe.StageGraph.chain(4, 4), [4] * 8, at_once=at_once)
    assert pe.simulate(schedule, pe.Costs()).makespan == makespan
    assert max(map(peak_in_flight, schedule.programs)) == 4 * at_once


@settings(max_examples=60)
@given(schedule_names, st.integers(1, 4), sizes, st.sampled_from([None, 1, 2, 3]))
def test_the_programs_break_no_law(name: str, ranks: int, waves: list[int], at_once: int | None) -> None:
    pe.check(in_waves(name, chain_for(name, ranks), waves, at_once=at_once))


@st.composite
def callers(draw: st.DrawFn) -> tuple[list[int], list[int], list[bool]]:
    """Sizes of waves, how far ahead each is announced when one is taken, and whether its gradients are given."""
    count = draw(st.integers(0, 6))
    draw_list = lambda of: draw(st.lists(of, min_size=count, max_size=count))  # noqa: E731
    return draw_list(st.integers(0, 4)), draw_list(st.integers(0, 4)), draw_list(st.booleans())


@settings(max_examples=100)
@given(schedule_names, st.integers(1, 4), callers(), st.booleans())
def test_whatever_is_announced_each_event_ends_by_itself_and_nothing_given_is_lost(
    name: str, ranks: int, caller: tuple[list[int], list[int], list[bool]], forward_only: bool
) -> None:
    graph = chain_for(name, ranks)
    replica = WavesReplica(lambda count: pe.build(name, graph, count), forward_only=forward_only)
    machine = Rendezvous(graph)
    given_at_all: set[int] = set()
    waiting: list[int] = []

    def perform(batch: Batch) -> None:
        machine.given = given_at_all
        machine.perform(batch)

    announced, firsts = 0, [0]
    for place, (size, horizon, gives) in enumerate(zip(*caller, strict=True)):
        while announced < min(len(caller[0]), place + 1 + horizon):
            replica.announce(caller[0][announced])
            firsts.append(firsts[-1] + caller[0][announced])
            announced += 1
        for microbatch in range(firsts[place], firsts[place] + size):
            perform(replica.ask(microbatch))
            waiting.append(microbatch)
        if gives and not forward_only and waiting:
            given_at_all.update(waiting)
            perform(replica.give(tuple(waiting)))
            waiting = []
    perform(replica.close())
    replica.drop(replica.open)
    perform(replica.drain())
    assert machine.is_silent()
    whole = in_waves(name, graph, caller[0])
    for rank, performed in enumerate(machine.performed):
        done = Counter(action for action in performed if isinstance(action, BACKWARD))
        wanted = Counter(a for a in whole.programs[rank] if isinstance(a, BACKWARD) and a.microbatch in given_at_all)
        assert done == wanted
