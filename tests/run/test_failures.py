"""Whatever breaks, every rank says what, nobody hangs, and the next call is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import pipeline_engine as pe
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.testing import run_ranks_in_threads
from tests.run.breaking import NUM_RANKS, Boom, Breakable, Broken, Cell, Subject, cells, judge_broken
from tests.run.playing import ROWS, Rank, batch, loss_of
from tests.run.processes import Crash, run_in_processes

CELLS = list(cells())


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.fault}-{cell.entry}-{cell.rank}")
def test_whatever_breaks_in_a_thread_every_rank_says_what_and_the_next_call_is_right(cell: Cell) -> None:
    def on_rank(transport: pe.MemoryTransport) -> Broken:
        subject = Subject(transport, cell.schedule)
        with subject.pipeline:
            return subject.suffer(cell)

    judge_broken(cell, run_ranks_in_threads(on_rank, NUM_RANKS))


def suffer_all(rank: int) -> dict[Cell, Broken]:
    outcomes = {}
    for schedule in sorted({cell.schedule for cell in CELLS}):
        subject = Subject(pe.TorchTransport(), schedule)
        with subject.pipeline:
            for cell in CELLS:
                if cell.schedule == schedule:
                    outcomes[cell] = subject.suffer(cell)
    return outcomes


def test_the_same_holds_between_processes_for_one_pipeline_that_breaks_in_every_way_in_turn() -> None:
    ranks = run_in_processes(suffer_all, NUM_RANKS)
    for rank in ranks:
        assert not isinstance(rank, Crash), rank
    for cell in CELLS:
        judge_broken(cell, [rank[cell] for rank in ranks])


# The error that an embedding makes of another rank's failure.


class OwnError(Exception):
    """What callers of an embedding know."""


def break_one_rank(transport: Transport, way: str) -> tuple[BaseException, str, BaseException]:
    """Rank 1 fails in an action, and then cannot say how many microbatches there are.

    Returns:
        what this rank raised then, and what its caller had called; and what it raised of the second.
    """

    def own(failure: pe.PeerFailedError) -> Exception:
        return OwnError(f"of rank {failure.rank}: {failure.cause}") if "Boom" in failure.cause else failure

    rank = Rank(transport, make_stage=Breakable, peer_error=own)
    rank.stage.way = way if rank.number == 1 else ""
    called = []

    def go_through() -> None:
        called.append("forward")
        outputs = rank.pipeline.forward(batch(ROWS))
        rank.pipeline.meet()  # every rank has its outputs
        called.append("backward")
        sum(loss_of(output, index) for index, output in enumerate(outputs)).backward()
        called.append("flush")
        rank.pipeline.flush()

    with rank.pipeline:
        in_action = told(go_through, Boom, OwnError)
        microbatches = iter(()) if rank.number == 1 else batch(ROWS)
        in_agreement = told(lambda: rank.pipeline.forward(microbatches), pe.UsageError, pe.PeerFailedError)
    return in_action, called[-1], in_agreement


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_another_ranks_failure_is_raised_as_an_embedding_wants_it_also_out_of_the_callers_backward(way: str) -> None:
    seen = run_ranks_in_threads(lambda transport: break_one_rank(transport, way), 3)
    in_action, where, in_agreement = zip(*seen, strict=True)
    assert [type(error) for error in in_action] == [OwnError, Boom, OwnError]
    assert where[:2] == (way, way)  # the last rank may have been through with its part
    for error in (in_action[0], in_action[2]):
        assert str(error) == f"of rank 1: Boom: in {way}"
        assert isinstance(error.__cause__, pe.PeerFailedError) and error.__cause__.rank == 1
    assert [type(error) for error in in_agreement] == [pe.PeerFailedError, pe.UsageError, pe.PeerFailedError]


# Building, and leaving for good.


def told(call: Callable[[], object], *errors: type[BaseException]) -> BaseException:
    with pytest.raises(errors) as raised:
        call()
    return raised.value


def build_badly_once(transport: Transport) -> str:
    """Rank 1 is given the wrong stages; then all build again, over the same transport."""
    if transport.rank == 1:
        graph = pe.StageGraph.chain(3, 3)
        error = told(lambda: pe.Pipeline({}, graph=graph, schedule="1f1b", transport=transport), pe.UsageError)
    else:
        error = told(lambda: Rank(transport), pe.PeerFailedError)
    rank = Rank(transport)
    with rank.pipeline:
        rank.train(ROWS)
        rank.check_gradients(range(len(ROWS)), ROWS)
    return str(error)


def build_badly_in_process(rank: int) -> str:
    return build_badly_once(pe.TorchTransport())


def leave_for_good(transport: Transport) -> list[str]:
    """Rank 1's exception ends its ``with``; the others try to go on."""
    rank, said = Rank(transport), []
    try:
        with rank.pipeline as pipeline:
            try:
                for item in pipeline.stream(batch(ROWS)):
                    if item.index == 3 and rank.number == 1:
                        raise Boom("in the caller's code")
                    loss_of(item.outputs, item.index).backward()
                pipeline.flush()
            except pe.PeerFailedError as error:
                said.append(str(error))
            for use in (pipeline.flush, lambda: pipeline.forward([]), lambda: pipeline.step([], loss_of)):
                said.append(str(told(use, pe.TransportError)))
    except Boom as error:
        return [str(error), *error.__notes__]
    except pe.TransportError as error:  # of the flush at the end
        said.append(str(error))
    return said


def leave_for_good_in_process(rank: int) -> list[str]:
    return leave_for_good(pe.TorchTransport())


@pytest.mark.parametrize(
    "run",
    [
        lambda: run_ranks_in_threads(build_badly_once, 3),
        lambda: run_in_processes(build_badly_in_process, 3),
    ],
    ids=["threads", "processes"],
)
def test_a_rank_that_cannot_build_its_pipeline_is_named_by_all_and_they_can_build_again(run: Any) -> None:
    own = "rank 1 owns stages [1] of the graph, but was given []."
    peer = f"rank 1 failed while it performed building: UsageError: {own}"
    assert run() == [peer, own, peer]


@pytest.mark.parametrize(
    "run",
    [lambda: run_ranks_in_threads(leave_for_good, 3), lambda: run_in_processes(leave_for_good_in_process, 3)],
    ids=["threads", "processes"],
)
def test_after_a_rank_has_left_for_good_every_further_call_says_why_the_pipeline_is_broken(run: Any) -> None:
    first, own, last = run()
    cause = "rank 1 failed while it performed the caller's code since microbatch 3: Boom: in the caller's code"
    assert own == ["in the caller's code", "while rank 1 was in the caller's code since microbatch 3"]
    assert first == last == [cause, *[f"the pipeline is broken, because {cause}"] * 4]
