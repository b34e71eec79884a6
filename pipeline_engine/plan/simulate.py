"""Simulate: when each action of the lowered schedule starts and ends, under given costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from attrs import Attribute, define, field, frozen

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.actions import (
    COMPUTE,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    PostRecv,
    Program,
    Send,
    WaitRecv,
    WaitSend,
    Yield,
)
from pipeline_engine.plan.advance import lower
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.values import Value

PerStage = float | tuple[float, ...]


def _per_stage(value: float | Sequence[float]) -> PerStage:
    return float(value) if isinstance(value, (int, float)) else tuple(float(each) for each in value)


def _check_cost(_: object, attribute: Attribute[Any], value: PerStage) -> None:
    for each in value if isinstance(value, tuple) else (value,):
        if not each >= 0 or math.isinf(each):
            raise ScheduleError(f"Costs.{attribute.name} is {each}; a cost is a finite number of seconds, 0 or more.")


@frozen
class Costs:
    """What actions cost, in seconds.

    Args:
        forward: one forward; a number, or one for each stage.
        backward_input: the half of a backward that makes the input gradient; a number, or one for each stage.
        backward_weight: the other half; a whole backward costs both.
        loss: the caller's code between a yield and the end of its backward call, without the stages' backwards.
        latency: from a send to the earliest arrival.
        seconds_per_byte: added to the latency for each of ``num_bytes``.
        num_bytes: size of one message.
        weights: relative cost of each microbatch; empty means 1 for each.

    Raises:
        ScheduleError: a cost is negative, infinite or not a number.
    """

    forward: PerStage = field(default=1.0, converter=_per_stage, validator=_check_cost)
    backward_input: PerStage = field(default=1.0, converter=_per_stage, validator=_check_cost)
    backward_weight: PerStage = field(default=1.0, converter=_per_stage, validator=_check_cost)
    loss: float = field(default=0.0, converter=float, validator=_check_cost)
    latency: float = field(default=0.0, converter=float, validator=_check_cost)
    seconds_per_byte: float = field(default=0.0, converter=float, validator=_check_cost)
    num_bytes: float = field(default=0.0, converter=float, validator=_check_cost)
    weights: tuple[float, ...] = field(default=(), converter=tuple, validator=_check_cost)

    def of(self, action: Action) -> float:
        """Seconds that ``action`` keeps its rank busy."""
        match action:
            case Forward(stage, m):
                return self._at(self.forward, stage) * self._weight(m)
            case Backward(stage, m):
                whole = self._at(self.backward_input, stage) + self._at(self.backward_weight, stage)
                return whole * self._weight(m)
            case BackwardInput(stage, m):
                return self._at(self.backward_input, stage) * self._weight(m)
            case BackwardWeight(stage, m):
                return self._at(self.backward_weight, stage) * self._weight(m)
            case Yield():
                return self.loss
            case _:
                return 0.0

    @property
    def transfer(self) -> float:
        """Seconds from a send to its arrival."""
        return self.latency + self.seconds_per_byte * self.num_bytes

    @staticmethod
    def _at(cost: PerStage, stage: int) -> float:
        if not isinstance(cost, tuple):
            return cost
        if stage >= len(cost):
            raise ScheduleError(f"costs are given for {len(cost)} stages, but there is a stage {stage}.")
        return cost[stage]

    def _weight(self, microbatch: int) -> float:
        if not self.weights:
            return 1.0
        if microbatch >= len(self.weights):
            raise ScheduleError(f"weights are given for {len(self.weights)} microbatches, there is a {microbatch}.")
        return self.weights[microbatch]


@frozen
class Span:
    """One action of one rank, from ``start`` to ``end`` in seconds."""

    action: Action
    start: float
    end: float


@frozen
class Timeline:
    """What a simulation found.

    Attributes:
        spans: for each rank its computing actions and yields in order.
        makespan: seconds from the start to the end of the last action.
        bubble: idle share of all ranks' time: idle / (ranks * makespan).
        peak_in_flight: for each rank the largest number of activations (of one stage and microbatch) held at once,
            from their forward to the end of their whole backward.
    """

    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    bubble: float
    peak_in_flight: tuple[int, ...]


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Play the lowered schedule against a clock of its own.

    Args:
        schedule: computing verbs only, or lowered.
        costs: seconds.

    Raises:
        ScheduleError: the programs deadlock, or costs do not cover the stages or microbatches.
    """
    lowered = lower(schedule)
    clock = _Clock(lowered, costs)
    clock.run()
    makespan = max((span.end for spans in clock.spans for span in spans), default=0.0)
    busy = sum(span.end - span.start for spans in clock.spans for span in spans)
    available = len(lowered.programs) * makespan
    return Timeline(
        spans=tuple(tuple(spans) for spans in clock.spans),
        makespan=makespan,
        bubble=1.0 - busy / available if available else 0.0,
        peak_in_flight=tuple(peak_in_flight(program) for program in lowered.programs),
    )


def peak_in_flight(program: Program) -> int:
    """The largest number of activations held at once by a rank that performs ``program``."""
    held = peak = 0
    for action in program:
        match action:
            case Forward():
                held += 1
            case Backward() | BackwardWeight():
                held -= 1
        peak = max(peak, held)
    return peak


@define
class _Clock:
    schedule: Schedule
    costs: Costs
    now: list[float] = field(init=False)
    next: list[int] = field(init=False)
    spans: list[list[Span]] = field(init=False)
    sent: dict[tuple[Value, int, int], float] = field(init=False, factory=dict)
    posted: dict[tuple[Value, int, int], float] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        ranks = self.schedule.programs
        self.now, self.next, self.spans = [0.0 for _ in ranks], [0 for _ in ranks], [[] for _ in ranks]

    def run(self) -> None:
        while any(self._run_rank(rank) for rank in range(len(self.next))):
            pass
        for rank, program in enumerate(self.schedule.programs):
            if self.next[rank] < len(program):
                raise ScheduleError(
                    f"schedule {self.schedule.name!r} deadlocks: rank {rank} step {self.next[rank]}   "
                    f"{program[self.next[rank]]} never happens; check() shows the whole picture."
                )

    def _run_rank(self, rank: int) -> bool:
        program, before = self.schedule.programs[rank], self.next[rank]
        while self.next[rank] < len(program) and self._perform(rank, program[self.next[rank]]):
            self.next[rank] += 1
        return self.next[rank] > before

    def _perform(self, rank: int, action: Action) -> bool:
        """Move the rank's clock past ``action``; False if what it waits for has not happened yet."""
        match action:
            case Send(value, target):
                self.sent[value, rank, target] = self.now[rank]
            case PostRecv(value, source):
                self.posted[value, source, rank] = self.now[rank]
            case WaitRecv(value, source):
                return self._wait(rank, (value, source, rank))
            case WaitSend(value, target):
                return self._wait(rank, (value, rank, target))
            case _ if isinstance(action, (*COMPUTE, Yield)):
                self._spend(rank, action)
        return True

    def _wait(self, rank: int, message: tuple[Value, int, int]) -> bool:
        if message not in self.sent or message not in self.posted:
            return False
        arrival = max(self.sent[message], self.posted[message]) + self.costs.transfer
        self.now[rank] = max(self.now[rank], arrival)
        return True

    def _spend(self, rank: int, action: Compute | Yield) -> None:
        start = self.now[rank]
        self.now[rank] = start + self.costs.of(action)
        self.spans[rank].append(Span(action, start, self.now[rank]))
