"""Outline: a schedule reduced to what its makespan and its memory depend on, for trying many orders quickly.

A schedule's programs are numbered by place in the order, and the order says which of the caller's microbatches stands
at each place.  So the shape of a schedule is worked out once, and each order costs one pass over a table: sixteen
microbatches on four ranks take some 20 microseconds.

An outline leaves out what an order hardly touches: receives are posted in time, and an output reaches every rank
within one transfer.  So it is never slower than ``simulate``, and exact for one stage a rank and no transfer costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from math import inf
from operator import add, itemgetter, mul

from attrs import field, frozen

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.actions import (
    BACKWARD,
    COMPUTE,
    Action,
    Backward,
    BackwardWeight,
    Compute,
    Forward,
    Yield,
    makes,
    needs,
)
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.simulate import Costs
from pipeline_engine.plan.values import Channel, Output, OutputGrad, Value, channel_of

PerStage = float | Sequence[float]

_Pick = Callable[[Sequence[float]], tuple[float, ...]]

_Link = tuple[int | None, tuple[tuple[int, Channel], ...], Action]
"""The action before it on its rank, those on other ranks that it waits for and how their message comes, and itself."""

_Row = tuple[int, int, int, float, float, float]
"""The row before it, the row that it waits for, its place in the order, its seconds, and seconds that the message
travels: whatever its size, and for each unit of weight.  Rows count from 1, and 0 is nothing."""


@frozen(eq=False)
class Outline:
    """What any order of a schedule's microbatches costs.

    Attributes:
        schedule: computing verbs only.
    """

    schedule: Schedule
    _befores: tuple[int, ...] = field(repr=False)
    _senders: tuple[int, ...] = field(repr=False)
    _places: _Pick = field(repr=False)
    _seconds: tuple[float, ...] = field(repr=False)
    _latencies: tuple[float, ...] = field(repr=False)
    _travels: tuple[float, ...] = field(repr=False)  # empty if the size of a message does not matter
    _memory: tuple[tuple[_Pick, tuple[float, ...]], ...] = field(repr=False)

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs, activation_bytes: PerStage = 1.0) -> Outline:
        """Reduce a schedule.

        Args:
            schedule: computing verbs only.
            costs: seconds; their weights are not used.
            activation_bytes: what a stage keeps of a microbatch of weight 1 until its backward is done; a number, or
                one for each stage.

        Raises:
            ScheduleError: the programs cannot reach their end.
        """
        rows = _rows(_links(schedule, with_yields=costs.loss > 0), costs, schedule.num_microbatches)
        befores, senders, places, seconds, latencies, travels = zip(*rows, strict=True) if rows else ((),) * 6
        memory = [_memory_steps(program, activation_bytes) for program in schedule.programs]
        return cls(
            schedule,
            befores,
            senders,
            _picking(places),
            seconds,
            latencies,
            travels if any(travels) else (),
            tuple((_picking(each), amounts) for each, amounts in memory if each),
        )

    def makespan(self, weights: Sequence[float]) -> float:
        """Seconds until all is done, with ``weights`` by place in the order."""
        scale = self._places((*weights, 1.0))
        travels: Iterable[float] = self._latencies
        if self._travels:
            travels = map(add, travels, map(mul, self._travels, scale))
        seconds = map(mul, self._seconds, scale)
        end = [0.0]
        for before, sender, travel, duration in zip(self._befores, self._senders, travels, seconds, strict=True):
            start, arrival = end[before], end[sender] + travel
            end.append((start if start > arrival else arrival) + duration)
        return max(end)

    def peak(self, weights: Sequence[float]) -> float:
        """Bytes held at most on any rank, with ``weights`` by place in the order."""
        return max(map(max, self._held(weights)), default=0.0)

    def fits(self, weights: Sequence[float], memory_budget: float) -> bool:
        """Whether no rank ever holds more bytes than ``memory_budget``."""
        return memory_budget == inf or all(max(held) <= memory_budget for held in self._held(weights))

    def _held(self, weights: Sequence[float]) -> Iterator[Iterator[float]]:
        """For each rank the bytes that it holds after each of its forwards and backwards."""
        return (accumulate(map(mul, amounts, places(weights))) for places, amounts in self._memory)


def _picking(places: Sequence[int]) -> _Pick:
    """Numbers at many places at once."""
    return itemgetter(*places) if len(places) > 1 else lambda numbers: tuple(numbers[place] for place in places)


def of_stage(value: PerStage, stage: int) -> float:
    """A number that is one for all stages, or one for each."""
    if not isinstance(value, Sequence):
        return float(value)
    if stage >= len(value):
        raise ScheduleError(f"activation_bytes are given for {len(value)} stages, but there is a stage {stage}.")
    return float(value[stage])


def _memory_steps(program: Sequence[Action], activation_bytes: PerStage) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """At which place a rank takes how many bytes per unit of weight, or gives them back."""
    steps: list[tuple[int, float]] = []
    for action in program:
        match action:
            case Forward(stage, m):
                steps.append((m, of_stage(activation_bytes, stage)))
            case Backward(stage, m) | BackwardWeight(stage, m):
                steps.append((m, -of_stage(activation_bytes, stage)))
    return tuple(place for place, _ in steps), tuple(amount for _, amount in steps)


def _rows(links: Sequence[_Link], costs: Costs, num_places: int) -> list[_Row]:
    """A row for each action, and in front of it one of no length for each further message that it waits for."""
    plain = Costs(costs.forward, costs.backward_input, costs.backward_weight, loss=costs.loss)
    rows: list[_Row] = []
    row_of: list[int] = []
    for before, senders, action in links:
        previous = 0 if before is None else row_of[before]
        waits = [(row_of[sender], *costs.travel(channel)) for sender, channel in senders] or [(0, 0.0, 0.0)]
        place = action.microbatch  # type: ignore[union-attr]
        if isinstance(action, Yield):  # the caller's code takes its time whatever the microbatch weighs
            waits, own = [*waits, (0, 0.0, 0.0)], num_places
        else:
            own = place
        for sender, latency, travel in waits[:-1]:
            rows.append((previous, sender, place, 0.0, latency, travel))
            previous = len(rows)
        sender, latency, travel = waits[-1]
        rows.append((previous, sender, own, plain.of(action), latency, travel))
        row_of.append(len(rows))
    return rows


@lru_cache(maxsize=64)
def _links(schedule: Schedule, *, with_yields: bool) -> tuple[_Link, ...]:
    """The actions of all ranks in an order in which they can happen, each with what it waits for."""
    programs = [_reduced(program, with_yields=with_yields) for program in schedule.programs]
    walk = _Walk(schedule, programs, next=[0] * len(programs), last=[None] * len(programs))
    while any(walk.go_on(rank) for rank in range(len(programs))):
        pass
    if len(walk.links) < sum(map(len, programs)):
        raise ScheduleError(f"schedule {schedule.name!r} cannot reach its end; check() shows why.")
    return tuple(walk.links)


def _reduced(program: Sequence[Action], *, with_yields: bool) -> list[Action]:
    """The computing actions, and if asked for a yield before the first backward of each microbatch."""
    actions: list[Action] = []
    seen: set[int] = set()
    for action in program:
        if isinstance(action, BACKWARD) and with_yields and action.microbatch not in seen:
            seen.add(action.microbatch)
            actions.append(Yield(action.microbatch))
        if isinstance(action, COMPUTE):
            actions.append(action)
    return actions


@frozen(eq=False)
class _Walk:
    schedule: Schedule
    programs: Sequence[Sequence[Action]]
    next: list[int]
    last: list[int | None]
    links: list[_Link] = field(factory=list)
    made: dict[Value, tuple[int, int]] = field(factory=dict)  # row and rank

    def go_on(self, rank: int) -> bool:
        """Take what can be taken on ``rank``; whether there was anything."""
        program, start = self.programs[rank], self.next[rank]
        while self.next[rank] < len(program) and self._take(rank, program[self.next[rank]]):
            self.next[rank] += 1
        return self.next[rank] > start

    def _take(self, rank: int, action: Action) -> bool:
        wanted = [value for value in self._needs(action) if not isinstance(value, OutputGrad)]
        if any(value not in self.made for value in wanted):
            return False
        row = len(self.links)
        self.links.append((self.last[rank], tuple(self._messages(rank, action, wanted)), action))
        self.last[rank] = row
        for value in makes(action):
            self.made[value] = (row, rank)
        return True

    def _messages(self, rank: int, action: Action, wanted: Sequence[Value]) -> Iterator[tuple[int, Channel]]:
        for value in wanted:
            sender, source = self.made[value]
            if source != rank:
                travels = Output(value.microbatch) if isinstance(action, Yield) else value
                yield sender, channel_of(travels, source, rank)

    def _needs(self, action: Action | Compute) -> tuple[Value, ...]:
        if isinstance(action, Yield):  # an output is as good as what the last stage returned
            return makes(Forward(self.schedule.graph.last_stage, action.microbatch))
        return needs(action, self.schedule.graph)
