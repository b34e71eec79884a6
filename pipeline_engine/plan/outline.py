"""Outline: a schedule reduced to what its makespan and its memory depend on, for trying many orders quickly.

A schedule's programs are numbered by place in the order, and the order says which of the caller's microbatches stands
at each place.  So the shape of a schedule is worked out once, and each order costs one pass over a table: sixteen
microbatches on four ranks take some 20 microseconds.

An outline leaves out what an order hardly touches: receives are posted in time, and an output reaches every rank
within one transfer.  So it is never slower than ``simulate``, and exact for one stage a rank and no transfer costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter, mul

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
from pipeline_engine.plan.values import OutputGrad, Value

PerStage = float | Sequence[float]

_Pick = Callable[[Sequence[float]], tuple[float, ...]]

_Link = tuple[int | None, tuple[int, ...], Action]
"""The row before it on its rank, rows on other ranks that it waits for, and the action."""


@frozen(eq=False)
class Outline:
    """What any order of a schedule's microbatches costs.

    Attributes:
        schedule: computing verbs only.
    """

    schedule: Schedule
    _befores: tuple[int, ...] = field(repr=False)
    _senders: tuple[int, ...] = field(repr=False)
    _seconds: tuple[float, ...] = field(repr=False)
    _places: _Pick = field(repr=False)
    _memory: tuple[tuple[_Pick, tuple[float, ...]], ...] = field(repr=False)
    _transfer: float

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
        links = _links(schedule, with_yields=costs.loss > 0)
        unweighted = Costs(costs.forward, costs.backward_input, costs.backward_weight, loss=costs.loss)
        befores, senders, places, seconds = _columns(links, unweighted, schedule.num_microbatches)
        memory = [_memory_steps(program, activation_bytes) for program in schedule.programs]
        held = tuple((_picking(each), amounts) for each, amounts in memory if each)
        return cls(schedule, befores, senders, seconds, _picking(places), held, costs.transfer)

    def makespan(self, weights: Sequence[float]) -> float:
        """Seconds until all is done, with ``weights`` by place in the order."""
        transfer = self._transfer
        seconds = map(mul, self._seconds, self._places((*weights, 1.0)))
        end = [-transfer]  # what those wait for that wait for nobody
        for before, sender, duration in zip(self._befores, self._senders, seconds, strict=True):
            start, arrival = end[before], end[sender] + transfer
            end.append((start if start > arrival else arrival) + duration)
        return max(0.0, *end)

    def peak(self, weights: Sequence[float]) -> float:
        """Bytes held at most on any rank, with ``weights`` by place in the order."""
        return max(
            (max(accumulate(map(mul, amounts, places(weights)))) for places, amounts in self._memory), default=0.0
        )


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


def _columns(
    links: Sequence[_Link], costs: Costs, num_places: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """For each action: the row before it, the one that it waits for, its place in the order, and its seconds.

    Rows count from 1, and 0 is nothing.  An action that waits for several others gets rows of no length before it.
    """
    rows: list[tuple[int, int, int, float]] = []
    row_of: list[int] = []
    for before, senders, action in links:
        previous = 0 if before is None else row_of[before]
        for sender in senders[1:]:
            rows.append((previous, row_of[sender], num_places, 0.0))
            previous = len(rows)
        place = action.microbatch if isinstance(action, COMPUTE) else num_places
        rows.append((previous, row_of[senders[0]] if senders else 0, place, costs.of(action)))
        row_of.append(len(rows))
    befores, waits, places, seconds = zip(*rows, strict=True) if rows else ((), (), (), ())
    return befores, waits, places, seconds


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
        senders = tuple(self.made[value][0] for value in wanted if self.made[value][1] != rank)
        self.links.append((self.last[rank], senders, action))
        self.last[rank] = row
        for value in makes(action):
            self.made[value] = (row, rank)
        return True

    def _needs(self, action: Action | Compute) -> tuple[Value, ...]:
        if isinstance(action, Yield):  # an output is as good as what the last stage returned
            return makes(Forward(self.schedule.graph.last_stage, action.microbatch))
        return needs(action, self.schedule.graph)
