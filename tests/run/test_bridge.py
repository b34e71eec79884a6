"""A pipeline behaves like one model whose loss and backward are the caller's: same bits, whatever the caller does."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.testing import run_ranks_in_threads
from tests.run.playing import (
    DEADLINE,
    ROWS,
    WIDTH,
    Case,
    Layer,
    Played,
    Rank,
    batch,
    judge,
    loss_of,
    on_ranks,
    play_all,
)
from tests.run.processes import Crash, run_in_processes
from tests.strategies import Ask, Event, Finish, Give, Skip, histories, one_by_one, schedule_names

some_rows = st.lists(st.sampled_from([0, 1, 2, 3, 5, 200]), max_size=9)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = draw(some_rows)
    entry = draw(st.sampled_from(["stream", "stream", "stream", "forward", "step"]))
    history = histories(len(rows))
    if entry == "forward":  # he who called forward has taken all
        history = history.filter(lambda events: sum(isinstance(event, Ask) for event in events) == len(rows))
    return Case(draw(schedule_names), draw(st.integers(1, 4)), rows, entry, draw(history))


@settings(max_examples=150)
@given(cases())
def test_whatever_the_caller_does_outputs_and_gradients_are_those_of_one_process(case: Case) -> None:
    again = Case(case.schedule, case.num_ranks, (2, 1), "stream", one_by_one(2))
    ranks = run_ranks_in_threads(lambda transport: play_all([case, again], transport), case.num_ranks)
    for index, each in enumerate([case, again]):
        judge(each, [played[index] for played in ranks])


PROCESS_ROWS = (3, 200, 1, 0, 5)
ALL: tuple[Event, ...] = (Ask(0), Ask(1), Ask(2), Ask(3), Ask(4))
PROCESS_HISTORIES: list[tuple[str, tuple[Event, ...]]] = [
    ("stream", one_by_one(5)),
    ("stream", (*ALL, Give((4, 0, 2)), Finish(), Give((1, 3)))),
    ("stream", (Ask(0), Ask(1), Give((1,)), Skip(0), Ask(2))),
    ("forward", (*ALL, Give((0, 1, 2, 3, 4)))),
    ("forward", (*ALL, Give((3,)), Give((1,)))),
    ("step", ()),
]


def play_in_process(rank: int, cases: list[list[Case]]) -> list[Played]:
    return [played for of_one_schedule in cases for played in play_all(of_one_schedule, pe.TorchTransport())]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_same_holds_between_processes(num_ranks: int) -> None:
    cases = [[Case(name, num_ranks, PROCESS_ROWS, *each) for each in PROCESS_HISTORIES] for name in pe.SCHEDULES]
    ranks = run_in_processes(play_in_process, num_ranks, cases)
    for rank in ranks:
        assert not isinstance(rank, Crash), rank
    for index, case in enumerate(case for of_one_schedule in cases for case in of_one_schedule):
        judge(case, [rank[index] for rank in ranks])


def test_a_dropped_gradient_would_be_noticed() -> None:
    """The check itself: a transfer that brings None in the place of one gradient does not pass."""

    class Forgetful(Layer):
        def forward(self, x: torch.Tensor, *, number: int = 0) -> torch.Tensor:
            return super().forward(x.detach() if (self.number, number) == (1, 3) else x, number=number)

    def on_rank(rank: Rank) -> bool:
        rank.train(ROWS)
        try:
            rank.check_gradients(range(len(ROWS)), ROWS)
        except AssertionError:
            return False
        return True

    assert on_ranks(on_rank, 3, "1f1b", Forgetful) == [False, True, True]


# Several at once.


def two_side_by_side(first: Transport, second: Transport) -> None:
    one, other = Rank(first), Rank(second, "gpipe")
    with one.pipeline, other.pipeline:
        for left, right in zip(one.pipeline.stream(batch(ROWS)), other.pipeline.stream(batch(ROWS)), strict=True):
            (loss_of(left.outputs, left.index) + loss_of(right.outputs, right.index)).backward()
        one.check_gradients(range(len(ROWS)), ROWS)
        other.check_gradients(range(len(ROWS)), ROWS)


def test_two_pipelines_live_side_by_side_under_one_loss() -> None:
    seconds = pe.MemoryTransport.connect(3)
    run_ranks_in_threads(lambda transport: two_side_by_side(transport, seconds[transport.rank]), 3)


def two_in_process(rank: int) -> None:
    two_side_by_side(pe.TorchTransport(), pe.TorchTransport())


def test_two_pipelines_share_one_group_of_processes() -> None:
    for rank in run_in_processes(two_in_process, 2):
        assert not isinstance(rank, Crash), rank


# Numbers of microbatches.


@pytest.mark.parametrize("schedule", pe.SCHEDULES)
def test_their_number_may_differ_from_call_to_call_and_be_none_or_one(schedule: str) -> None:
    def on_rank(rank: Rank) -> None:
        for count in (1, 5, 2, 0, 3):
            rank.zero_grad()
            rank.train([2] * count)
            rank.check_gradients(range(count), [2] * count)

    on_ranks(on_rank, 3, schedule)


def test_no_microbatch_at_all_is_legal_everywhere() -> None:
    def on_rank(rank: Rank) -> None:
        assert list(rank.pipeline.stream([])) == [] == rank.pipeline.forward([]) == rank.pipeline.step([], loss_of)
        rank.check_gradients([], [])

    on_ranks(on_rank, 3)


# Wrong arguments: at build, before anything moves.


def refused_on_every_rank(error: type[Exception], words: str, num_ranks: int, build: Any) -> None:
    def on_rank(transport: Transport) -> None:
        with pytest.raises(error, match=words):
            build(transport)

    run_ranks_in_threads(on_rank, num_ranks, timeout=10)


def test_an_unknown_schedule_is_refused_at_build() -> None:
    words = r"schedule 'magic' is unknown; one of 'gpipe', '1f1b'"
    refused_on_every_rank(pe.ScheduleError, words, 2, lambda transport: Rank(transport, "magic"))


def test_stages_that_do_not_cover_the_graph_are_refused_at_build() -> None:
    transport = pe.MemoryTransport.connect(2)[1]
    with pytest.raises(pe.UsageError, match=r"rank 1 owns stages \[1\] of the graph, but was given \[0\]"):
        pe.Pipeline({0: Layer(0)}, graph=pe.StageGraph.chain(2, 2), schedule="1f1b", transport=transport)


def test_a_transport_of_another_size_is_refused_at_build() -> None:
    transport = pe.MemoryTransport.connect(3)[0]
    words = "the graph is for 2 ranks, the transport joins 3; the numbers must be equal"
    with pytest.raises(pe.UsageError, match=words):
        pe.Pipeline({0: Layer(0)}, graph=pe.StageGraph.chain(2, 2), schedule="1f1b", transport=transport)


def test_an_unlawful_schedule_of_the_callers_own_is_refused_at_build() -> None:
    graph = pe.StageGraph.chain(2, 2)
    crossed = pe.Schedule.from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", graph, "crossed")
    words = "schedule 'crossed' deadlocks:\nrank 0 step 1   0B0   waits for"
    refused_on_every_rank(pe.ScheduleError, words, 2, lambda transport: Rank(transport, crossed))


def test_a_schedule_for_another_graph_is_refused_at_build() -> None:
    other = pe.build("1f1b", pe.StageGraph.chain(3, 3), 2)
    words = "schedule '1f1b' was made for another graph than the pipeline's"
    refused_on_every_rank(pe.UsageError, words, 2, lambda transport: Rank(transport, other))


def test_a_lawful_schedule_of_the_callers_own_is_run_as_it_is() -> None:
    text = "0F0 0F1 0F2 0B2 0B0 0B1\n1F0 1F1 1F2 1B2 1B0 1B1"
    own = pe.Schedule.from_text(text, pe.StageGraph.chain(2, 2), "last first")

    def on_rank(rank: Rank) -> str:
        outputs = rank.pipeline.forward(batch([2, 1, 3]))
        torch.stack([loss_of(output, number) for number, output in enumerate(outputs)]).sum().backward()
        rank.check_gradients([2, 0, 1], [2, 1, 3])
        return " ".join(rank.log)

    assert on_ranks(on_rank, 2, own) == text.split("\n")


def test_a_schedule_for_another_number_of_microbatches_is_refused() -> None:
    schedule = pe.build("1f1b", pe.StageGraph.chain(2, 2), 3)

    def on_rank(rank: Rank) -> None:
        with pytest.raises(pe.UsageError, match="schedule '1f1b' is for 3 microbatches, not for 2"):
            rank.pipeline.stream(batch([1, 1]))

    on_ranks(on_rank, 2, schedule)


def test_something_that_is_no_microbatch_is_refused_with_the_cure() -> None:
    def on_rank(rank: Rank) -> None:
        with pytest.raises((pe.UsageError, pe.PeerFailedError), match="wrap the arguments of the first stage"):
            next(rank.pipeline.stream([torch.zeros(1, WIDTH)]))  # type: ignore[list-item]
        rank.train([1])
        rank.check_gradients([0], [1])

    on_ranks(on_rank)


def test_an_iterable_without_a_length_needs_its_number() -> None:
    def on_rank(rank: Rank) -> None:
        with pytest.raises(pe.UsageError, match="number of microbatches is unknown"):
            rank.pipeline.stream(iter(batch([1])))
        with pytest.raises(pe.UsageError, match="num_microbatches is 2, but 1 microbatches were passed"):
            rank.pipeline.stream(batch([1]), num_microbatches=2)

    on_ranks(on_rank)


# The end.


def test_a_closed_pipeline_says_that_it_is() -> None:
    def on_rank(transport: Transport) -> None:
        pipeline = Rank(transport).pipeline
        pipeline.close()
        pipeline.close()
        for use in (pipeline.flush, lambda: pipeline.stream([]), lambda: pipeline.forward([])):
            with pytest.raises(pe.UsageError, match="the pipeline is closed; build another one"):
                use()

    run_ranks_in_threads(on_rank, 2)


def test_a_deadline_names_who_was_waited_for() -> None:
    too_late = threading.Event()

    def on_rank(transport: Transport) -> None:
        pipeline = Rank(transport, deadline=0.2).pipeline
        if transport.rank == 0:
            with pytest.raises(pe.DeadlineError, match=r"within 0.2 seconds; waiting for rank 1"):
                pipeline.flush()
            too_late.set()
        assert too_late.wait(DEADLINE)
        pipeline.close()

    run_ranks_in_threads(on_rank, 2)


def test_an_exception_in_the_loop_body_reaches_the_caller_unchanged_and_every_other_rank() -> None:
    def on_rank(transport: Transport) -> str:
        try:
            with Rank(transport).pipeline as pipeline:
                for item in pipeline.stream(batch(ROWS)):
                    if item.index == 2 and transport.rank == 1:
                        raise ZeroDivisionError("the caller's own")
                    loss_of(item.outputs, item.index).backward()
        except (ZeroDivisionError, pe.PeerFailedError) as error:
            return str(error)
        return "nothing"

    told = "rank 1 failed while it performed the caller's code since microbatch 2: ZeroDivisionError: the caller's own"
    assert run_ranks_in_threads(on_rank, 3) == [told, "the caller's own", told]
