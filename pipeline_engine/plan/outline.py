"""Outline: a schedule reduced to what its makespan and its memory depend on, for trying many orders quickly.

A schedule's programs are numbered by place in the order, and the order says which of the caller's microbatches stands
at each place.  So the shape of a schedule is worked out once, and each order costs one pass over a table: sixteen
microbatches on four ranks take some 10 microseconds.  An order that begins like one that was tried costs less: the pass
goes on where the two part.

An outline leaves out what an order hardly touches: receives are posted in time, and an output reaches every rank
within one transfer.  So it is never slower than ``simulate``, and exact for one stage a rank and no transfer costs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import add, itemgetter, mul

from attrs import evolve, field, frozen

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
from pipeline_engine.plan.bounds import Bound
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.simulate import Costs
from pipeline_engine.plan.values import Channel, Output, OutputGrad, Value, channel_of

PerStage = float | Sequence[float]

_Pick = Callable[[Sequence[float]], tuple[float, ...]]

_Steps = tuple[tuple[int, ...], tuple[float, ...]]
"""Places, and bytes per unit of weight that are taken there or, below 0, given back."""

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
        window: how many whole microbatches are as much as a rank holds when it holds most, if all weigh the same.
        whole_bytes: bytes that it holds of one of these, if that weighs 1.
    """

    schedule: Schedule
    window: int
    whole_bytes: float
    _rows: Sequence[_Row] = field(repr=False)  # and their columns
    _befores: tuple[int, ...] = field(repr=False)
    _senders: tuple[int, ...] = field(repr=False)
    _places: _Pick = field(repr=False)
    _seconds: tuple[float, ...] = field(repr=False)
    _latencies: tuple[float, ...] = field(repr=False)
    _travels: tuple[float, ...] = field(repr=False)  # empty if the size of a message does not matter
    _lasts: _Pick = field(repr=False)  # of all ends those of each rank's last row
    _starts: tuple[int, ...] = field(repr=False)  # for each place the number of rows that no later place touches
    _memory: tuple[tuple[_Pick, tuple[float, ...]], ...] = field(repr=False)
    _shapes: tuple[tuple[float, ...], ...] = field(repr=False)  # amounts that a rank holds at once, the largest first

    @staticmethod
    def of(schedule: Schedule, costs: Costs, activation_bytes: PerStage = 1.0) -> Outline:
        """Reduce a schedule.

        Args:
            schedule: computing verbs only.
            costs: seconds; their weights are not used.
            activation_bytes: what a stage keeps of a microbatch of weight 1 until its backward is done; a number, or
                one for each stage.

        Raises:
            ScheduleError: the programs cannot reach their end.
        """
        per_stage = tuple(of_stage(activation_bytes, stage) for stage in range(schedule.graph.num_stages))
        return _outline(schedule, evolve(costs, weights=()), per_stage)

    @property
    def num_rows(self) -> int:
        """How long the table is, 1 at least."""
        return max(len(self._befores), 1)

    def makespan(self, weights: Sequence[float]) -> float:
        """Seconds until all is done, with ``weights`` by place in the order."""
        return self.last_of(self.ends(weights))

    def last_of(self, ends: Sequence[float]) -> float:
        """The makespan that ``ends`` found."""
        return max(self._lasts(ends), default=0.0)

    def ends(self, weights: Sequence[float], tried: Sequence[float] = (0.0,), place: int = 0) -> list[float]:
        """Seconds at which each row of the table ends, with ``weights`` by place in the order.

        Args:
            weights: by place in the order.
            tried: what this function returned for weights that are the same before ``place``.
            place: the first place at which the weights differ from those.
        """
        first = self._starts[place] if len(tried) > 1 else 0
        scale = self._places((*weights, 1.0))[first:]
        travels: Iterable[float] = self._latencies[first:]
        if self._travels:
            travels = map(add, travels, map(mul, self._travels[first:], scale))
        seconds = map(mul, self._seconds[first:], scale)
        end = [*tried[: first + 1]]
        for before, sender, travel, duration in zip(
            self._befores[first:], self._senders[first:], travels, seconds, strict=True
        ):
            start, arrival = end[before], end[sender] + travel
            end.append((start if start > arrival else arrival) + duration)
        return end

    def longest_path(self, weights: Sequence[float], ends: Sequence[float]) -> Bound:
        """The rows on which the makespan hangs, summed up by place; ``ends`` are what it found for ``weights``."""
        scale = (*weights, 1.0)
        rates = [0.0] * len(scale)
        row = max(map(int, self._lasts(range(len(ends)))), key=lambda last: ends[last], default=0)
        while row:
            before, sender, place, seconds, latency, travel = self._rows[row - 1]
            rates[place] += seconds
            if ends[before] >= ends[sender] + (latency + travel * scale[place]):
                row = before
            else:
                rates[place] += travel
                rates[-1] += latency
                row = sender
        return tuple(rates)

    def peak(self, weights: Sequence[float]) -> float:
        """Bytes held at most on any rank, with ``weights`` by place in the order."""
        return max(map(max, self._held(weights)), default=0.0)

    def fullest_moment(self, weights: Sequence[float]) -> Bound:
        """What is held, by place, when ``peak`` is reached."""
        held = [[*each] for each in self._held(weights)]
        fullest, (places, amounts) = max(zip(held, self._memory, strict=True), key=lambda each: max(each[0]))
        until = fullest.index(max(fullest)) + 1
        rates = [0.0] * (len(weights) + 1)
        for place, amount in zip(places(range(len(weights)))[:until], amounts[:until], strict=True):
            rates[int(place)] += amount
        return tuple(rates)

    def peaks_of_any_order(self, weights: Sequence[float]) -> tuple[float, float]:
        """Bytes that lie below the ``peak`` of every order of these weights, and above it."""
        rising = sorted(weights)
        falling = rising[::-1]
        lows = (sum(map(mul, shape, rising)) for shape in self._shapes)
        highs = (sum(map(mul, shape, falling)) for shape in self._shapes)
        return max(lows, default=0.0), max(highs, default=0.0)

    def _held(self, weights: Sequence[float]) -> Iterator[Iterator[float]]:
        """For each rank the bytes that it holds after each of its forwards and backwards."""
        return (accumulate(map(mul, amounts, places(weights))) for places, amounts in self._memory)


def can_end(schedule: Schedule) -> bool:
    """Whether the programs can go through; computing verbs only."""
    try:
        _links(schedule, with_yields=True)
    except ScheduleError:
        return False
    return True


@lru_cache(maxsize=64)
def _outline(schedule: Schedule, costs: Costs, activation_bytes: tuple[float, ...]) -> Outline:
    rows = _rows(_links(schedule, with_yields=costs.loss > 0), costs, schedule.num_microbatches)
    befores, senders, places, seconds, latencies, travels = zip(*rows, strict=True) if rows else ((),) * 6
    ranks = [_memory_steps(program, activation_bytes) for program in schedule.programs]
    memory = _fullest(ranks)
    fullest = max((peak for steps in ranks for peak in _peaks(*steps)), key=lambda peak: sum(peak.values()), default={})
    whole_bytes = max(fullest.values(), default=0.0)
    return Outline(
        schedule,
        math.ceil(sum(fullest.values()) / whole_bytes) if whole_bytes else 0,
        whole_bytes,
        rows,
        befores,
        senders,
        _picking(places),
        seconds,
        latencies,
        travels if any(travels) else (),
        _picking(sorted(set(range(1, len(rows) + 1)).difference(befores))),
        _first_rows(places, schedule.num_microbatches),
        tuple((_picking(each), amounts) for each, amounts in memory),
        tuple({tuple(sorted(peak.values(), reverse=True)) for steps in memory for peak in _peaks(*steps)}),
    )


def _first_rows(places: Sequence[int], num_places: int) -> tuple[int, ...]:
    """For each place the number of rows in front of the first one that has that place or a later one."""
    first = [len(places)] * num_places
    for row, place in reversed([*enumerate(places)]):
        if place < num_places:
            first[place] = row
    return tuple(reversed([*accumulate(reversed(first), min)]))


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


def _memory_steps(program: Sequence[Action], activation_bytes: Sequence[float]) -> _Steps:
    """At which place a rank takes how many bytes per unit of weight, or gives them back."""
    steps: list[tuple[int, float]] = []
    for action in program:
        match action:
            case Forward(stage, m):
                steps.append((m, activation_bytes[stage]))
            case Backward(stage, m) | BackwardWeight(stage, m):
                steps.append((m, -activation_bytes[stage]))
    return tuple(place for place, _ in steps), tuple(amount for _, amount in steps)


def _fullest(ranks: Sequence[_Steps]) -> list[_Steps]:
    """The ranks whose memory counts: not those that never hold more, of any microbatch, than the first of these."""
    peaks = [_peaks(*steps) for steps in ranks]
    first = max(range(len(ranks)), key=lambda rank: sum(map(len, peaks[rank])), default=0)
    return [
        steps
        for rank, steps in enumerate(ranks)
        if steps[0] and (rank == first or not _are_within(peaks[rank], peaks[first]))
    ]


def _peaks(places: Sequence[int], amounts: Sequence[float]) -> list[dict[int, float]]:
    """Bytes by place whenever something is about to be given back."""
    held: defaultdict[int, float] = defaultdict(float)
    peaks = []
    for step, (place, amount) in enumerate(zip(places, amounts, strict=True)):
        if amount < 0 <= amounts[step - 1]:
            peaks.append(dict(held))
        held[place] += amount
        if not held[place]:
            del held[place]
    return peaks


def _are_within(these: Iterable[dict[int, float]], others: Iterable[dict[int, float]]) -> bool:
    """Whether these are parts of others in the same order; if they are in another order, False will do."""
    rest = iter(others)
    other: dict[int, float] = {}
    for peak in these:
        while not all(other.get(place, 0.0) >= amount for place, amount in peak.items()):
            if (following := next(rest, None)) is None:
                return False
            other = following
    return True


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
    return _by_place(walk.links)


def _by_place(links: Sequence[_Link]) -> tuple[_Link, ...]:
    """What hangs on the first places alone comes first, so that it can stay when later places change."""
    hang_on: list[int] = []
    for before, senders, action in links:
        causes = (hang_on[link] for link in (*([] if before is None else [before]), *(link for link, _ in senders)))
        hang_on.append(max(action.microbatch, *causes, 0))  # type: ignore[union-attr]
    kept = sorted(range(len(links)), key=hang_on.__getitem__)
    moved = {link: number for number, link in enumerate(kept)}
    return tuple(
        (
            None if before is None else moved[before],
            tuple((moved[sender], channel) for sender, channel in senders),
            action,
        )
        for before, senders, action in (links[link] for link in kept)
    )


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
