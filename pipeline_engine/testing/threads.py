"""Ranks as threads of one process, over a transport in memory."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from threading import Thread
from time import monotonic
from typing import TypeVar

from attrs import Factory, define

from pipeline_engine.errors import PeerFailedError
from pipeline_engine.run.transports.base import Failure, Transport
from pipeline_engine.run.transports.memory import MemoryTransport

T = TypeVar("T")


@define(eq=False)
class _Rank:
    """One rank's thread and what became of it."""

    transport: Transport
    function: Callable[[Transport], object]
    errors: list[BaseException]  # shared by all ranks, in the order in which they were raised
    results: dict[int, object]  # shared by all ranks
    thread: Thread = Factory(lambda self: Thread(target=self.run, daemon=True), takes_self=True)

    def run(self) -> None:
        rank = self.transport.rank
        try:
            self.results[rank] = self.function(self.transport)
        except BaseException as error:
            self.errors.append(error)
            self.transport.fail(Failure(rank, "the function of run_ranks_in_threads", repr(error), ""))
            self.transport.close()

    def stack(self) -> str:
        frame = sys._current_frames().get(self.thread.ident or 0)
        lines = traceback.format_stack(frame) if frame else ["  (ended)\n"]
        return f"rank {self.transport.rank}:\n{''.join(lines)}"


def run_ranks_in_threads(function: Callable[[Transport], T], num_ranks: int, timeout: float = 60.0) -> list[T]:
    """Call ``function(transport)`` once per rank, each in a thread of its own, over ``MemoryTransport``.

    Args:
        function: takes this rank's transport.
        num_ranks: number of ranks.
        timeout: seconds for all of it.

    Returns:
        what the function returned, by rank.

    Raises:
        TimeoutError: a rank had not ended after ``timeout`` seconds; the message shows the stack of each.
        BaseException: the first exception that a rank raised which is no PeerFailedError, else the first one.
    """
    errors: list[BaseException] = []
    results: dict[int, T] = {}
    ranks = [_Rank(transport, function, errors, results) for transport in MemoryTransport.connect(num_ranks)]  # type: ignore[arg-type]
    until = monotonic() + timeout
    for rank in ranks:
        rank.thread.start()
    for rank in ranks:
        rank.thread.join(max(until - monotonic(), 0))
    if any(rank.thread.is_alive() for rank in ranks):
        errors.append(_hang(ranks, timeout))
    for rank in ranks:
        rank.transport.close()
    for error in sorted(errors, key=lambda error: isinstance(error, PeerFailedError)):
        raise error
    return [results[rank] for rank in range(num_ranks)]


def _hang(ranks: list[_Rank], timeout: float) -> TimeoutError:
    stacks = "\n".join(rank.stack() for rank in ranks)
    return TimeoutError(f"not all ranks ended within {timeout} seconds.\n{stacks}")
