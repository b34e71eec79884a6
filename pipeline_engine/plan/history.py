"""History: what a caller has done in one call, and what it meant for this rank, remembered from call to call.

A training loop does the same in every step.  What the replica makes of a history depends on the history alone, so it
is worked out once and looked up afterwards; only a caller who does something new costs a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from attrs import define, field

from pipeline_engine.plan.actions import Program
from pipeline_engine.plan.advance import Replica

MAX_MOMENTS = 10_000
"""How many moments are remembered over all histories, before all are forgotten."""


@define(eq=False)
class Moment:
    """A point in a history: the event and the actions that led to it, and the moments that are known to follow."""

    words: str = ""
    program: Program = ()
    after: dict[Hashable, Moment] = field(factory=dict)


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

    def remember(self, moment: Moment, event: tuple[str, tuple[Hashable, ...]], program: Program) -> Moment:
        """Add what follows a moment."""
        self._count += 1
        name, arguments = event
        moment.after[event] = Moment(" ".join(map(str, (name, *arguments))), program)
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
    _events: list[tuple[str, tuple[Hashable, ...]]] = field(init=False, factory=list)
    _replica: Replica | None = field(init=False, default=None)

    def play(self, event: str, *arguments: Hashable) -> Program:
        """Play an event, a method of ``Replica`` with its arguments; the actions that it adds for this rank."""
        known = self.moment.after.get((event, arguments))
        if known is None:
            known = self.memory.remember(self.moment, (event, arguments), self._work_out(event, arguments))
        else:
            self._replica = None
        self._events.append((event, arguments))
        self.moment = known
        return known.program

    def _work_out(self, event: str, arguments: tuple[Hashable, ...]) -> Program:
        if self._replica is None:
            self._replica = self.make_replica()
            for past, past_arguments in self._events:
                getattr(self._replica, past)(*past_arguments)
        batch = getattr(self._replica, event)(*arguments)
        return batch[self.rank] if isinstance(batch, tuple) else ()
