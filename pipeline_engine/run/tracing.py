"""Tracing: records what every rank really does, in the schedule's own actions, on one clock.

    tracer = pe.Tracer()
    with pe.Pipeline(..., transport=transport, tracer=tracer) as pipeline:
        ...                                                   # one call
        pipeline.flush()
        trace = tracer.gather(transport)                      # on every rank; the same trace everywhere
    print(pe.report(trace))

Note [one clock]: ranks of one machine share a clock.  Between machines the clocks are brought together by the times
at which ranks leave a few exchanges, which is as exact as an exchange is quick: good to about a millisecond.
That, and the clock for CUDA streams, nobody has run yet.
"""

from __future__ import annotations

import pickle
import platform
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch
from attrs import define, field, frozen

from pipeline_engine.errors import UsageError
from pipeline_engine.plan.actions import Action, Forward
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.simulate import Span
from pipeline_engine.plan.trace import Trace
from pipeline_engine.run.microbatches import Microbatches
from pipeline_engine.run.transports.base import Transport

_ROUNDS = 5


class Clock(Protocol):
    """Marks moments cheaply, and says afterwards when they were."""

    def mark(self) -> Any:
        """A moment."""

    def seconds(self, mark: Any) -> float:
        """When it was, by ``time.perf_counter``."""


class HostClock:
    """The host's own clock."""

    def mark(self) -> float:
        """Now."""
        return perf_counter()

    def seconds(self, mark: float) -> float:
        """The moment itself."""
        return mark


class CudaClock:
    """Moments at which the current stream gets to a place in its work; nothing waits for them until they are read."""

    def __init__(self) -> None:
        self._origin = self.mark()
        self._origin.synchronize()
        self._seconds = perf_counter()

    def mark(self) -> torch.cuda.Event:
        """The end of what has been put on the current stream so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        """Waits until the stream has got there."""
        mark.synchronize()
        return self._seconds + float(self._origin.elapsed_time(mark)) / 1e3


@define(eq=False)
class Recording:
    """One call on this rank."""

    schedule: Schedule
    microbatches: Microbatches
    clock: Clock
    weights: dict[int, float] = field(factory=dict)
    _marks: list[tuple[Action, Any, Any]] = field(init=False, factory=list)

    def around(self, perform: Callable[[Action], None]) -> Callable[[Action], None]:
        """The same function, with every action that it performs recorded."""

        def recorded(action: Action) -> None:
            if isinstance(action, Forward):
                self.weights[action.microbatch] = self.microbatches[action.microbatch].weight
            start = self.clock.mark()
            perform(action)
            self._marks.append((action, start, self.clock.mark()))

        return recorded

    def spans(self) -> tuple[Span, ...]:
        """All that was recorded."""
        seconds = self.clock.seconds
        return tuple(Span(action, seconds(start), seconds(end)) for action, start, end in self._marks)


@frozen
class _Word:
    """What one rank tells the others."""

    machine: str
    exits: tuple[float, ...]
    weights: dict[int, float]
    spans: tuple[Span, ...]


class Tracer:
    """Records the calls of a pipeline on this rank; hand it to ``Pipeline(tracer=...)``, one for each rank.

    Args:
        calls: how many of the newest calls are remembered.
    """

    def __init__(self, calls: int = 1) -> None:
        self._recordings: deque[Recording] = deque(maxlen=calls)

    def begin(self, schedule: Schedule, microbatches: Microbatches) -> Recording:
        """The pipeline calls this when a call begins: ``schedule`` will be performed on ``microbatches``."""
        clock = CudaClock() if torch.cuda.is_initialized() else HostClock()  # type: ignore[no-untyped-call]
        self._recordings.append(Recording(schedule, microbatches, clock))
        return self._recordings[-1]

    def gather(self, transport: Transport, *, call: int = -1, deadline: float = 60.0) -> Trace:
        """Bring the recordings of one call together.  Every rank calls this, between two calls of the pipeline.

        Args:
            transport: that of the pipeline, still open.
            call: which of the remembered calls; the newest is -1.
            deadline: seconds for each exchange.

        Returns:
            the same trace on every rank.

        Raises:
            UsageError: no such call was recorded.
            PeerFailedError, DeadlineError: as any exchange.
        """
        try:
            recording = self._recordings[call]
        except IndexError:
            raise UsageError(
                f"call {call} is not among the {len(self._recordings)} that this tracer recorded."
            ) from None
        exits = tuple(_exit_of_exchange(transport, deadline) for _ in range(_ROUNDS))
        word = _Word(_machine(), exits, recording.weights, recording.spans())
        words: list[_Word] = [pickle.loads(each) for each in transport.exchange(pickle.dumps(word), deadline=deadline)]
        weights = {m: weight for word in words for m, weight in word.weights.items()}
        return Trace(
            recording.schedule,
            [weights.get(m, 1.0) for m in range(recording.schedule.num_microbatches)],
            [_shifted(word.spans, _behind(word, words[0])) for word in words],
        )


def _exit_of_exchange(transport: Transport, deadline: float) -> float:
    transport.exchange(b"", deadline=deadline)
    return perf_counter()


def _behind(word: _Word, first: _Word) -> float:
    """Seconds to add to a rank's times; see Note [one clock]."""
    if word.machine == first.machine:
        return 0.0
    return median(theirs - own for own, theirs in zip(word.exits, first.exits, strict=True))


def _shifted(spans: Sequence[Span], seconds: float) -> list[Span]:
    return [Span(span.action, span.start + seconds, span.end + seconds) for span in spans]


def _machine() -> str:
    """The same for all processes that share a clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else f"{platform.node()} {uuid.getnode()}"
