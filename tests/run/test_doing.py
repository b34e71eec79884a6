"""A wait that takes too long ends with a table of what every rank does, and with the likely cause."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest
import torch.distributed as dist

import pipeline_engine as pe
from pipeline_engine.plan.actions import Backward, Forward, Send, WaitRecv
from pipeline_engine.plan.values import Activation
from pipeline_engine.run.doing import Doing, State, describe, table
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.testing import run_ranks_in_threads
from tests.run.playing import DEADLINE, ROWS, Rank, batch, loss_of
from tests.run.processes import Crash, run_in_processes

SHORT = 2.0  # seconds


def test_an_action_is_described_as_in_the_program_and_in_words() -> None:
    assert describe(Forward(1, 2)) == "1F2 (forward of stage 1, microbatch 2)"
    assert (
        describe(Send(Activation(0, 2), 1)) == "send:x[0,2]>1 (send of the output of stage 0, microbatch 2, to rank 1)"
    )


def test_a_record_says_where_its_rank_is() -> None:
    doing = Doing()
    with doing.meets("building"):
        assert doing.place == "building"
    assert doing.place == "the caller's code"
    doing.begin("stream")
    doing.item = 3
    assert doing.place == "the caller's code since microbatch 3"
    doing.action = Backward(0, 3)
    assert doing.place == "0B3 (backward of stage 0, microbatch 3)"
    doing.action = WaitRecv(Activation(0, 1), 0)
    assert b'"waits_for": 0' in doing.state()


def test_a_record_stays_after_an_error_until_the_next_call() -> None:
    doing = Doing()
    doing.begin("flush")
    with suppress(pe.DeadlineError), doing.meets("agreement on flush"):
        raise pe.DeadlineError
    doing.has_failed = True
    assert b"waits for all ranks: agreement on flush, which has raised" in doing.state()
    assert doing.place == "the caller's code"
    doing.begin("stream")
    doing.action = Forward(0, 1)
    doing.has_failed = True
    assert b"0F1 (forward of stage 0, microbatch 1), which has raised" in doing.state()
    doing.begin("flush")
    assert b"in the caller's code" in doing.state() and b"raised" not in doing.state()


def test_the_table_has_a_line_for_each_rank_and_the_likely_cause() -> None:
    waits = State(2, "stream", "recv:x[0,1]<0", 0, is_idle=False)
    works = State(2, "stream", "0F1 (forward of stage 0, microbatch 1)", None, is_idle=False)
    assert table({0: works, 1: waits}, 2) == (
        "rank 0   call 2 (stream)   0F1 (forward of stage 0, microbatch 1)\n"
        "rank 1   call 2 (stream)   recv:x[0,1]<0\n"
        "likely cause: rank 0 takes long for 0F1 (forward of stage 0, microbatch 1)."
    )
    assert "cause" not in table({0: waits, 1: waits}, 2)
    raised = State(2, "stream", "recv:x[0,1]<0, which has raised", None, is_idle=False, has_failed=True)
    assert table({0: works, 1: raised}, 2).endswith("\nlikely cause: rank 0 takes long for " + works.words + ".")
    assert "cause" not in table({0: waits, 1: raised}, 2)


def dawdle(transport: Transport, linger: Any, go: Any) -> str:
    """Rank 1 lingers in the caller's code at microbatch 3, until the others have given up."""
    rank = Rank(transport)
    rank.train(ROWS)  # a first pass may take longer than the deadline
    rank.pipeline._accord.deadline = SHORT
    with pytest.raises((pe.DeadlineError, pe.PeerFailedError)) as raised:
        for item in rank.pipeline.stream(batch(ROWS)):
            if (rank.number, item.index) == (1, 3):
                linger()
            loss_of(item.outputs, item.index).backward()
        rank.pipeline.flush()
    if rank.number == 0:
        go()
    doing = rank.pipeline._accord.doing
    assert b"which has raised" in doing.state() and doing.place == "the caller's code"
    with rank.pipeline:
        rank.zero_grad()
        rank.pipeline._accord.deadline = DEADLINE
        rank.train(ROWS)
        rank.check_gradients(range(len(ROWS)), ROWS)
    return str(raised.value)


def in_threads() -> list[str]:
    given_up = threading.Event()
    return run_ranks_in_threads(lambda transport: dawdle(transport, given_up.wait, given_up.set), 3)


def in_process(rank: int) -> str:
    store = dist.distributed_c10d._get_default_store()
    return dawdle(pe.TorchTransport(), lambda: store.wait(["go"]), lambda: store.set("go", ""))


@pytest.mark.parametrize("run", [in_threads, lambda: run_in_processes(in_process, 3)], ids=["threads", "processes"])
def test_a_rank_that_lingers_in_the_callers_code_is_named_at_the_deadline_on_every_rank(run: Any) -> None:
    for said in run():
        assert not isinstance(said, Crash), said
        assert f"within {SHORT} seconds; waiting for rank" in said
        assert "\nrank 0   call 2 (stream)   " in said
        assert "\nrank 1   call 2 (stream)   in the caller's code since microbatch 3\n" in said
        assert "\nrank 2   call 3 (flush)   waits for all ranks: agreement on flush" in said
        assert "\nlikely cause: rank 1 is in the caller's code since microbatch 3; rank 0 performed 2 calls, " in said


def test_a_rank_that_made_fewer_calls_is_named_at_the_deadline() -> None:
    given_up = threading.Event()

    def on_rank(transport: Transport) -> str:
        rank = Rank(transport)
        rank.pipeline.flush()
        rank.pipeline._accord.deadline = SHORT
        if rank.number == 1:
            given_up.wait()
        with pytest.raises((pe.DeadlineError, pe.PeerFailedError)) as raised:
            rank.pipeline.flush()
        given_up.set()
        rank.pipeline.close()
        return str(raised.value)

    for said in run_ranks_in_threads(on_rank, 2):
        assert "\nrank 0   call 2 (flush)   waits for all ranks: agreement on flush\n" in said
        assert said.endswith(
            "likely cause: rank 1 is in the caller's code; rank 0 performed 2 calls, rank 1 performed 1 calls."
        ), said
