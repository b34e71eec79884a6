"""Simulate: when each action of the lowered schedule starts and ends, under given costs.

A rank does one thing at a time.  A message leaves when it is both sent and posted, and travels as its channel's costs
say; messages do not slow each other down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import define, evolve, field

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.actions import (
    COMPUTE,
    Action,
    PostRecv,
    Program,
    Publish,
    Send,
    WaitRecv,
    WaitSend,
    Yield,
)
from pipeline_engine.plan.advance import lower
from pipeline_engine.plan.collector import without_collector
from pipeline_engine.plan.costs import Costs as Costs
from pipeline_engine.plan.costs import PerStage as PerStage
from pipeline_engine.plan.numbering import Numbering, numbering_of
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.timeline import Idle, Phases, Place
from pipeline_engine.plan.timeline import Span as Span
from pipeline_engine.plan.timeline import Timeline as Timeline
from pipeline_engine.plan.timeline import peak_in_flight as peak_in_flight
from pipeline_engine.plan.values import Value, channel_of


@without_collector
def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Play the lowered schedule against a clock of its own.

    Args:
        schedule: computing verbs only, or lowered.
        costs: seconds.

    Raises:
        ScheduleError: the programs deadlock, or costs do not cover the stages or microbatches.
    """
    lowered = lower(schedule)
    clocks = _run(lowered, costs)
    makespan = max((clock.now for clock in clocks), default=0.0)
    idle = tuple(evolve(clock.idle, drain=clock.idle.drain + makespan - clock.now) for clock in clocks)
    available = len(clocks) * makespan
    return Timeline(
        spans=tuple(tuple(clock.spans) for clock in clocks),
        makespan=makespan,
        bubble=sum(each.total for each in idle) / available if available else 0.0,
        peak_in_flight=tuple(peak_in_flight(program) for program in lowered.programs),
        idle=idle,
        waited_for=tuple(clock.waited_for for clock in clocks),
    )


_Moment = tuple[float, Place]
"""Seconds, and the span on which they hang."""


def _latest(moment: _Moment) -> tuple[float, int]:
    """Of two moments at the same second the one that hangs on a span, not on the beginning of a program."""
    seconds, (_, step) = moment
    return seconds, step


@define(eq=False)
class _Arrivals:
    """Messages between all ranks, by number, and who waits for one.

    Attributes:
        times: seconds at which a message has arrived and for how many of these it travelled, and the span that it
            hung on; once it is both sent and posted.
        waiting: the ranks that wait for a message.
    """

    costs: Costs
    numbering: Numbering
    times: dict[int, tuple[float, float, Place]] = field(factory=dict)
    waiting: dict[int, list[int]] = field(factory=dict)
    _half: dict[int, _Moment] = field(factory=dict)  # messages that are sent or posted, but not both
    _travel: dict[int, tuple[float, float]] = field(factory=dict)  # by message of microbatch 0

    def meet(self, value: Value, source: int, target: int, moment: _Moment) -> list[int]:
        """A message is sent, or its receive is posted; returns the ranks that can go on."""
        message = self.numbering.message(value, source, target)
        other = self._half.pop(message, None)
        if other is None:
            self._half[message] = moment
            return []
        leaves, because = max(moment, other, key=_latest)
        seconds = self._seconds(message, value, source, target)
        self.times[message] = (leaves + seconds, seconds, because)
        return self.waiting.pop(message, [])

    def _seconds(self, message: int, value: Value, source: int, target: int) -> float:
        kind = message % (self.numbering.width * self.numbering.graph.num_ranks**2)
        if kind not in self._travel:
            self._travel[kind] = self.costs.travel(channel_of(value, source, target))
        latency, per_weight = self._travel[kind]
        return latency + per_weight * self.costs.weight(value.microbatch) if per_weight else latency


@define(eq=False)
class _Clock:
    """One rank's time.

    Attributes:
        now: seconds.
        because: the span on which ``now`` hangs.
        waited_for: by number of a span, the span that it had to wait for, if that is not the one before it.
    """

    rank: int
    program: Program
    costs: Costs
    arrivals: _Arrivals
    because: Place = field(init=False)
    now: float = 0.0
    step: int = 0
    idle: Idle = field(factory=Idle)
    spans: list[Span] = field(factory=list)
    waited_for: dict[int, Place] = field(factory=dict)
    woken: list[int] = field(factory=list)  # ranks that can go on because of this one
    _verbs: dict[type[Action], Callable[[Any], bool]] = field(init=False)
    _phases: Phases = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.because = (self.rank, -1)
        self._verbs = {
            **dict.fromkeys((*COMPUTE, Yield), self._spend),
            Publish: lambda _: True,
            Send: self._send,
            PostRecv: self._post,
            WaitRecv: lambda action: self._wait(action.value, action.from_rank, self.rank),
            WaitSend: lambda action: self._wait(action.value, self.rank, action.to_rank),
        }
        self._phases = Phases.of(self.program)

    def run(self) -> None:
        """Go on until something has to be waited for that has not left yet."""
        program, verbs = self.program, self._verbs
        while self.step < len(program):
            action = program[self.step]
            if not verbs[type(action)](action):
                return
            self.step += 1

    def _spend(self, action: Action) -> bool:
        start, place = self.now, len(self.spans)
        if self.because != (self.rank, place - 1):
            self.waited_for[place] = self.because
        self.because = (self.rank, place)
        self.now = start + self.costs.of(action)
        self.spans.append(Span(action, start, self.now))
        return True

    def _send(self, action: Send) -> bool:
        moment = (self.now, self.because)
        self.woken += self.arrivals.meet(action.value, self.rank, action.to_rank, moment)
        return True

    def _post(self, action: PostRecv) -> bool:
        moment = (self.now, self.because)
        self.woken += self.arrivals.meet(action.value, action.from_rank, self.rank, moment)
        return True

    def _wait(self, value: Value, source: int, target: int) -> bool:
        message = self.arrivals.numbering.message(value, source, target)
        known = self.arrivals.times.get(message)
        if known is None:
            self.arrivals.waiting.setdefault(message, []).append(self.rank)
            return False
        arrival, travelled, because = known
        if arrival > self.now:
            self.idle = self._blamed(arrival - self.now, travelled)
            self.now, self.because = arrival, because
        return True

    def _blamed(self, seconds: float, travelled: float) -> Idle:
        idle, latency = self.idle, min(seconds, travelled)
        cause = self._phases.cause(self.step)
        changes = {cause: getattr(idle, cause) + seconds - latency, "latency": idle.latency + latency}
        return evolve(idle, **changes)


def _run(schedule: Schedule, costs: Costs) -> list[_Clock]:
    arrivals = _Arrivals(costs, numbering_of(schedule.graph))
    clocks = [_Clock(rank, program, costs, arrivals) for rank, program in enumerate(schedule.programs)]
    awake = [clock.rank for clock in clocks]
    while awake:
        clock = clocks[awake.pop()]
        clock.run()
        awake += clock.woken
        clock.woken.clear()
    for clock in clocks:
        if clock.step < len(clock.program):
            raise ScheduleError(
                f"schedule {schedule.name!r} deadlocks: rank {clock.rank} step {clock.step}   "
                f"{clock.program[clock.step]} never happens; check() shows the whole picture."
            )
    return clocks
