"""Waves: a call that grows.  The caller adds microbatches while it runs, and takes them wave by wave."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field

from pipeline_engine.errors import UsageError
from pipeline_engine.run.call import Call
from pipeline_engine.run.microbatch import Microbatch


@define(eq=False)
class Waves:
    """One call of ``Pipeline.waves``; every rank adds and takes the same waves at the same points.

    What was added runs ahead of the caller, as far as 1F1B in waves goes; what was not added does not.

    Args:
        call: the call.
        queue: where the call reads its microbatches.
        check_open: raises if the pipeline is closed.
    """

    _call: Call
    _queue: deque[Microbatch]
    _check_open: Callable[[], None]
    _sizes: deque[int] = field(init=False, factory=deque)  # of the waves that were added and not taken
    _taken: list[range] = field(init=False, factory=list)  # microbatches of the waves that were taken

    @property
    def waiting(self) -> int:
        """How many waves were added and not taken yet."""
        return len(self._sizes)

    @property
    def open(self) -> set[int]:
        """Which waves were taken, by number from 0, and may still be given a gradient: what is kept for it stays."""
        microbatches = self._call.open
        return {number for number, wave in enumerate(self._taken) if not microbatches.isdisjoint(wave)}

    def add(self, microbatches: Sequence[Microbatch]) -> None:
        """One more wave, of any number of microbatches; it may run from the next ``take`` on.

        Raises:
            UsageError: the call has ended.
        """
        self._check_open()
        self._queue.extend(microbatches)
        self._sizes.append(len(microbatches))
        self._call.announce(len(microbatches))

    def take(self) -> list[Any]:
        """The outputs of the next wave, in the order of its microbatches; ``backward()`` on them is the caller's.

        Raises:
            UsageError: there is no wave to take, or the call has ended.
            PeerFailedError, TransportError, DeadlineError: as ``Pipeline.stream``.
        """
        self._check_open()
        if not self._sizes:
            raise UsageError("there is no wave to take: add one before.")
        self._call.resume()
        first = self._taken[-1].stop if self._taken else 0
        self._taken.append(range(first, first + self._sizes.popleft()))
        return [self._call.ask(microbatch) for microbatch in self._taken[-1]]

    def end(self) -> None:
        """No wave will be taken any more.  Gradients of what was taken may still be given."""
        self._call.is_running = False
