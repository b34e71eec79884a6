"""History: what a caller has done in one call, and what it meant for this rank, remembered from call to call.

A training loop does the same in every step.  What the replica makes of a history depends on the history alone, so it
is worked out once and looked up afterwards; only a caller who does something new costs a replay.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable

from attrs import define, field

from pipeline_engine.plan.actions import Program
from pipeline_engine.plan.advance import Replica
from pipeline_engine.plan.transfers import Batch

MAX_MOMENTS = 10_000
"""How many moments are remembered over all histories, before all are forgotten."""


Event = tuple[str, tuple[Hashable, ...]]
"""A method of ``Replica``, and its arguments."""


@define(eq=False)
class Moment:
    """A point in a history.

    Attributes:
        event: what led to it.
        words: the same for a reader.
        program: the actions that it adds.
        mark: a checksum of this event and of all before.
        after: the moments that are known to follow.
    """

    event: Event = ("", ())
    words: str = "nothing"
    program: Program = ()
    mark: int = 0
    after: dict[Event, Moment] = field(factory=dict)


@define(eq=False)
class Memory:
    """The beginnings of all histories of a pipeline, by what else decides about them."""

    _beginnings: dict[Hashable, Moment] = field(init=False, factory=dict)
    _count: int = field(init=False, default=0)

    def beginning(self, key: Hashable) -> Moment:
        """The moment before the first event of a call of this kind."""
        if self._count > MAX_MOMENTS:
            self._beginnings.clear()
            self._count = 0
        return self._beginnings.setdefault(key, Moment())

    def remember(self, moment: Moment, event: Event, program: Program) -> Moment:
        """Add what follows a moment."""
        self._count += 1
        name, arguments = event
        words = " ".join(map(str, (name, *arguments)))
        moment.after[event] = Moment(event, words, program, zlib.crc32(words.encode(), moment.mark))
        return moment.after[event]


@define(eq=False)
class History:
    """One call's events so far.

    Args:
        make_replica: a new replica of this kind of call.
        rank: whose actions are wanted.
        memory: of the pipeline.
        moment: where the call stands.
    """

    make_replica: Callable[[], Replica]
    rank: int
    memory: Memory
    moment: Moment
    _past: list[Moment] = field(init=False, factory=list)
    _replica: Replica | None = field(init=False, default=None)

    @property
    def marks(self) -> bytes:
        """Four bytes for each event so far, which depend on it and on all before."""
        return b"".join([moment.mark.to_bytes(4) for moment in self._past])

    @property
    def summary(self) -> str:
        """How many events there were, and which was the last."""
        return f"{len(self._past)} events, the last: {self.moment.words} ({self.moment.mark:08x})"

    def play(self, name: str, *arguments: Hashable) -> Program:
        """Play an event, a method of ``Replica`` with its arguments; the actions that it adds for this rank."""
        event = (name, arguments)
        known = self.moment.after.get(event)
        if known is None:
            known = self.memory.remember(self.moment, event, self._work_out(event))
        else:
            self._replica = None
        self._past.append(known)
        self.moment = known
        return known.program

    def _work_out(self, event: Event) -> Program:
        if self._replica is None:
            self._replica = self.make_replica()
            for moment in self._past:
                _play(self._replica, moment.event)
        batch = _play(self._replica, event)
        return batch[self.rank] if isinstance(batch, tuple) else ()


def _play(replica: Replica, event: Event) -> Batch | None:
    name, arguments = event
    batch: Batch | None = getattr(replica, name)(*arguments)
    return batch
