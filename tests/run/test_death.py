"""A rank that dies, exits, is stopped or interrupted in the middle of a stream is named by all others, soon."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pipeline_engine as pe
from tests.run.breaking import LIMIT
from tests.run.playing import DEADLINE, ROWS, Layer, Rank, batch, loss_of
from tests.run.processes import Crash, run_in_processes

AT = 1  # the microbatch
SHORT = 2.0  # seconds


class Mortal(Layer):
    """A stage that does something to its process in its forward of microbatch ``AT``, once."""

    fate: Callable[[], object] | None = None

    def forward(self, x: torch.Tensor, *, number: int = 0) -> torch.Tensor:
        if number == AT and (fate := self.fate) is not None:
            self.fate = None
            fate()
        return super().forward(x, number=number)


def kill(signal_number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signal_number)


def is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def pids() -> list[int]:
    known: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(known, os.getpid())
    return known


def outlive(rank: int, victim: int, number: int) -> list[Any]:
    """``victim`` ends itself by a signal, or exits; its neighbour is in the caller's code until then."""
    subject = Rank(pe.TorchTransport(), "1f1b", Mortal)
    of_all = pids()
    if rank == victim:
        subject.stage.fate = kill(number) if number else lambda: os._exit(3)
    began = monotonic()
    with pytest.raises(pe.PeerFailedError) as raised:
        for item in subject.pipeline.stream(batch(ROWS)):
            while rank == (victim + 1) % 4 and not is_dead(of_all[victim]):
                os.sched_yield()
            loss_of(item.outputs, item.index).backward()
        subject.pipeline.flush()
    seconds = monotonic() - began
    broken = []
    for use in (subject.pipeline.flush, lambda: subject.pipeline.forward(batch(ROWS))):
        with pytest.raises(pe.TransportError) as again:
            use()
        broken.append(str(again.value))
    subject.pipeline.close()
    return [raised.value.rank, str(raised.value), broken, seconds]


@pytest.mark.parametrize(("victim", "number"), [*((rank, signal.SIGKILL) for rank in range(4)), (1, 0)])
def test_a_rank_that_dies_in_a_stream_is_named_by_all_others_even_from_the_callers_code(
    victim: int, number: int
) -> None:
    results = run_in_processes(outlive, 4, victim, number)
    assert results.pop(victim) == f"rank {victim} ended with exit code {-number or 3}"
    for result in results:
        assert not isinstance(result, Crash), result
        named, text, broken, seconds = result
        assert named == victim and seconds < LIMIT
        assert text == f"rank {victim} failed while it performed an unknown action: its connection was lost"
        assert broken == [f"the pipeline is broken, because {text}"] * 2


def interrupt(rank: int) -> str:
    """Rank 0 sends Ctrl-C to rank 1, which waits for it or computes; then all train as if nothing had been."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    subject = Rank(pe.TorchTransport(), "1f1b", Mortal)
    peer = pids()[1]
    if rank == 0:
        subject.stage.fate = lambda: os.kill(peer, signal.SIGINT)
    with subject.pipeline:
        try:
            subject.train(ROWS)
            subject.pipeline.flush()
            said = "nothing"
        except (KeyboardInterrupt, pe.PeerFailedError) as error:
            said = f"{type(error).__name__}: {error}"
        subject.zero_grad()
        subject.train(ROWS)
        subject.check_gradients(range(len(ROWS)), ROWS)
    return said


def test_ctrl_c_on_one_rank_ends_the_call_on_all_and_the_next_one_is_right() -> None:
    first, own, last = run_in_processes(interrupt, 3)
    assert own == "KeyboardInterrupt: ", own
    for said in (first, last):
        assert said.startswith("PeerFailedError: rank 1 failed while it performed") and "KeyboardInterrupt" in said


def stop(rank: int) -> list[Any]:
    """Rank 2 stops itself; once the others have given up rank 0 lets it go on, and all train as if nothing had been."""
    subject = Rank(pe.TorchTransport(), "1f1b", Mortal)
    subject.train(ROWS)  # a first pass may take longer than the deadline
    subject.pipeline.flush()
    subject.pipeline._accord.deadline = SHORT
    peer = pids()[2]
    if rank == 2:
        subject.stage.fate = kill(signal.SIGSTOP)
    began = monotonic()
    with pytest.raises((pe.DeadlineError, pe.PeerFailedError)) as raised:
        subject.train(ROWS)
        subject.pipeline.flush()
    seconds = monotonic() - began
    if rank == 0:
        os.kill(peer, signal.SIGCONT)
    dist.barrier()
    subject.pipeline._accord.deadline = DEADLINE
    with subject.pipeline:
        subject.zero_grad()
        subject.train(ROWS)
        subject.check_gradients(range(len(ROWS)), ROWS)
    return [str(raised.value), seconds]


def test_a_stopped_rank_is_found_at_the_deadline_and_may_go_on_afterwards() -> None:
    results = run_in_processes(stop, 3)
    for result in results:
        assert not isinstance(result, Crash), result
    for said, seconds in results[:2]:
        assert seconds < LIMIT
        assert f"within {SHORT} seconds; waiting for rank" in said
        assert "rank 2   gives no answer" in said
        assert "likely cause: rank 2 gives no answer: its process is stopped, or one long call holds" in said
