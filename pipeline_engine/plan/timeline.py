"""Timeline: when everything happened, how long each rank was idle and why, and what the makespan hangs on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import field, frozen

from pipeline_engine.plan.actions import BACKWARD, Action, Backward, BackwardWeight, Forward


@frozen
class Span:
    """One action of one rank, from ``start`` to ``end`` in seconds."""

    action: Action
    start: float
    end: float


@frozen
class Idle:
    """Seconds in which a rank had nothing to do, by cause.

    Attributes:
        fill: the pipeline was filling: before the rank's first backward, or its first forward if there are no
            backwards.
        drain: the pipeline ran empty: after its last forward, up to the makespan.
        imbalance: in between, since a message that it waited for was sent late.
        latency: a message that it waited for was on its way.
    """

    fill: float = 0.0
    drain: float = 0.0
    imbalance: float = 0.0
    latency: float = 0.0

    @property
    def total(self) -> float:
        """Seconds idle, whatever the cause."""
        return self.fill + self.drain + self.imbalance + self.latency


@frozen
class Phases:
    """Which idle time of a rank is filling, draining, or neither; for whoever simulates and whoever measures.

    Attributes:
        first_backward: place of it in what the rank does; of the first forward if there are no backwards.
        last_forward: place of it; -1 if there is none.
    """

    first_backward: int
    last_forward: int

    @classmethod
    def of(cls, actions: Sequence[Action]) -> Phases:
        """Of a program, or of those of its actions that take time."""
        forwards = [place for place, action in enumerate(actions) if isinstance(action, Forward)]
        backwards = (place for place, action in enumerate(actions) if isinstance(action, BACKWARD))
        return cls(next(backwards, forwards[0] if forwards else 0), forwards[-1] if forwards else -1)

    def cause(self, place: int) -> str:
        """Why time was lost at the action in this place, or right before it: an attribute of ``Idle``."""
        if place <= self.first_backward:
            return "fill"
        return "drain" if place > self.last_forward else "imbalance"


Place = tuple[int, int]
"""A rank and a number of one of its spans."""


@frozen
class Timeline:
    """What a simulation found.

    Attributes:
        spans: for each rank its computing actions and yields in order.
        makespan: seconds from the start to the end of the last action.
        bubble: idle share of all ranks' time: idle / (ranks * makespan).
        peak_in_flight: for each rank the largest number of activations (of one stage and microbatch) held at once,
            from their forward to the end of their whole backward.
        idle: for each rank its idle seconds by cause; empty if the causes are not known.
        waited_for: for each rank, by number of its spans, the span that one hangs on if that is not the one before it.
    """

    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    bubble: float
    peak_in_flight: tuple[int, ...]
    idle: tuple[Idle, ...] = ()
    waited_for: tuple[dict[int, Place], ...] = field(default=(), repr=False, eq=False)

    def in_flight(self, rank: int) -> list[tuple[float, int]]:
        """Activations that ``rank`` holds over time: (seconds, number from then on)."""
        steps, held = [(0.0, 0)], 0
        for span in self.spans[rank]:
            if change := _change(span.action):
                held += change
                steps.append((span.start if change > 0 else span.end, held))
        return steps

    def critical_path(self) -> list[tuple[int, Span]]:
        """Rank and span of the actions on which the makespan hangs, from the first to the last.

        Each starts when the one before it has ended, or when messages that hang on that have come; any of them that
        took longer would make the whole longer.  Empty if nothing was computed.
        """
        ends = [(spans[-1].end, rank) for rank, spans in enumerate(self.spans) if spans]
        if not ends:
            return []
        rank = max(ends)[1]
        step = len(self.spans[rank]) - 1
        path = []
        while step >= 0:
            path.append((rank, self.spans[rank][step]))
            waited_for = self.waited_for[rank].get(step) if self.waited_for else None
            rank, step = waited_for or (rank, step - 1)
        return path[::-1]


def peak_in_flight(program: Iterable[Action]) -> int:
    """The largest number of activations held at once by a rank that performs ``program``."""
    held = peak = 0
    for action in program:
        held += _change(action)
        peak = max(peak, held)
    return peak


def _change(action: Action) -> int:
    """By how much an action changes the number of activations held."""
    if isinstance(action, Forward):
        return 1
    return -1 if isinstance(action, (Backward, BackwardWeight)) else 0
