"""A caller who leaves his loop on one rank is named within seconds by those who wait for what he will not take."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import pytest
from attrs import frozen

import pipeline_engine as pe
from pipeline_engine.run import hearing
from pipeline_engine.run.leaving import Departure, missed
from pipeline_engine.run.transports.base import SECONDS_TO_EXPLAIN, Transport
from pipeline_engine.testing import run_ranks_in_threads
from tests.run.playing import ROWS, Rank, batch, loss_of
from tests.run.processes import Crash, run_in_processes

NUM_RANKS, LEAVER, LAST = 3, 1, 1
LIMIT = 10.0  # seconds; it takes less than one, but for a busy machine, and the deadline is twice as long
LEFT = "rank 1 failed while it performed the caller's code: it left the loop over stream (call 1) after item 1; rank "


@frozen
class Ended:
    """What a rank raised in the loop, after how many seconds from the item at which one left, and what came then."""

    raised: str
    seconds: float
    is_right: bool


def raises(rank: Rank) -> None:
    for item in rank.pipeline.stream(batch(ROWS)):
        loss_of(item.outputs, item.index).backward()
        if item.index == LAST:
            raise ValueError("enough")


def breaks(rank: Rank) -> None:
    for item in rank.pipeline.stream(batch(ROWS)):
        loss_of(item.outputs, item.index).backward()
        if item.index == LAST:
            break


def drops_the_iterator(rank: Rank) -> None:
    items: Any = rank.pipeline.stream(batch(ROWS))
    for _ in range(LAST + 1):
        item = next(items)
        loss_of(item.outputs, item.index).backward()
    ring: list[Any] = [items]
    ring.append(ring)
    del items, ring
    gc.collect()


WAYS: list[Callable[[Rank], None]] = [raises, breaks, drops_the_iterator]


def leave(transport: Transport, way: Callable[[Rank], None]) -> Ended:
    """The leaver says nothing more until all others have raised; then all go on."""
    rank = Rank(transport)
    rank.train(ROWS)
    began, raised = monotonic(), ""
    try:
        if rank.number == LEAVER:
            way(rank)
        else:
            rank.train(ROWS)
            rank.pipeline.flush()
    except (ValueError, pe.PipelineError) as error:
        raised = str(error)
    seconds = monotonic() - began
    while rank.number == LEAVER and transport.failure() is None and monotonic() - began < 10:
        sleep(0.01)
    if rank.number == LEAVER:
        with pytest.raises(pe.PeerFailedError, match=re.escape(LEFT)):
            rank.pipeline.flush()
    with rank.pipeline:
        rank.zero_grad()
        rank.train(ROWS)
        rank.check_gradients(range(len(ROWS)), ROWS)
    return Ended(raised, seconds, True)


def leave_over_gloo(rank: int) -> list[Ended]:
    return [leave(pe.TorchTransport(), way) for way in WAYS]


def judge_left(way: Callable[[Rank], None], ranks: list[Ended]) -> None:
    own, others = ranks[LEAVER], [each for rank, each in enumerate(ranks) if rank != LEAVER]
    assert own.raised == ("enough" if way is raises else ""), ranks
    for each in others:
        assert re.match(re.escape(LEFT) + r"\d waits for item [234]", each.raised), ranks
        assert each.seconds < LIMIT, ranks
    assert all(each.is_right for each in ranks)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_in_threads_those_who_wait_name_the_one_who_left(way: Callable[[Rank], None]) -> None:
    judge_left(way, run_ranks_in_threads(lambda transport: leave(transport, way), NUM_RANKS))


def test_over_gloo_those_who_wait_name_the_one_who_left() -> None:
    ranks = run_in_processes(leave_over_gloo, NUM_RANKS)
    for rank in ranks:
        assert not isinstance(rank, Crash), rank
    for way, each in zip(WAYS, zip(*ranks, strict=True), strict=True):
        judge_left(way, list(each))


def leave_and_flush(rank: int) -> tuple[str, float]:
    """The leaver is in the next exchange at once, where ranks that wait for others say so late."""
    hearing._SECONDS_TO_BE_EARLY = LIMIT
    part = Rank(pe.TorchTransport())
    part.train(ROWS)
    began = monotonic()
    with pytest.raises(pe.PipelineError) as raised:
        if part.number == LEAVER:
            breaks(part)
        else:
            part.train(ROWS)
        part.pipeline.flush()
    seconds = monotonic() - began
    part.pipeline.flush()
    part.zero_grad()
    part.train(ROWS)
    part.check_gradients(range(len(ROWS)), ROWS)
    part.pipeline.close()
    return str(raised.value), seconds


def test_who_has_left_and_goes_on_says_at_once_where_he_is() -> None:
    for ended in run_in_processes(leave_and_flush, NUM_RANKS):
        assert not isinstance(ended, Crash), ended
        text, seconds = ended
        assert "rank 1" in text and "flush" in text and seconds < LIMIT, ended


def leave_lawfully(transport: Transport) -> bool:
    """All break at the same item, then take their time, one of them in the last item's loss."""
    rank = Rank(transport)
    for item in rank.pipeline.stream(batch(ROWS)):
        if item.index == LAST:
            if rank.number != LEAVER:
                sleep(SECONDS_TO_EXPLAIN + 0.3)
            loss_of(item.outputs, item.index).backward()  # which waits for the leaver's part, or has it
            break
        loss_of(item.outputs, item.index).backward()
    sleep(SECONDS_TO_EXPLAIN + 0.3)
    rank.check_gradients(range(LAST + 1), ROWS)
    rank.zero_grad()
    rank.train(ROWS)
    rank.check_gradients(range(len(ROWS)), ROWS)
    rank.pipeline.close()
    return True


def leave_lawfully_over_gloo(rank: int) -> bool:
    return leave_lawfully(pe.TorchTransport())


def test_a_break_at_the_same_item_on_all_ranks_is_lawful_however_long_they_take() -> None:
    assert run_ranks_in_threads(leave_lawfully, NUM_RANKS) == [True] * NUM_RANKS
    assert run_in_processes(leave_lawfully_over_gloo, NUM_RANKS) == [True] * NUM_RANKS


def explain(transport: Transport) -> str:
    """The leaver's ``with`` tells his exception, and that is better than that he has left."""
    rank = Rank(transport)
    with pytest.raises((ValueError, pe.PeerFailedError)) as raised, rank.pipeline:
        if rank.number == LEAVER:
            raises(rank)
        rank.train(ROWS)
    return str(raised.value)


def explain_over_gloo(rank: int) -> str:
    return explain(pe.TorchTransport())


def test_an_exception_that_leaves_the_pipeline_is_told_instead() -> None:
    for said in (run_ranks_in_threads(explain, NUM_RANKS), run_in_processes(explain_over_gloo, NUM_RANKS)):
        assert said[LEAVER] == "enough"
        for rank in (0, 2):
            assert (
                "rank 1 failed while it performed the caller's code since microbatch 1: ValueError: enough"
                in said[rank]
            )


def test_only_who_waits_for_an_item_that_will_not_be_taken_has_been_left() -> None:
    word = Departure(call=4, entry="stream", items=3, last=2).packed()
    failure = missed(1, word, 0, (4, 3), 3)
    assert failure is not None and (failure.rank, failure.doing) == (1, "the caller's code")
    assert failure.cause == "it left the loop over stream (call 4) after item 2; rank 0 waits for item 3"
    assert missed(1, word, 0, (4, 2), 2) is None
    assert missed(1, word, 0, (5, 3), 3) is None
    assert missed(1, word, 0, None, 3) is None
    assert missed(1, b"agreement", 0, (4, 3), 3) is None
