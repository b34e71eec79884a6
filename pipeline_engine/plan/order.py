"""Order: which microbatch comes when, so that uneven work leaves little idle time and fits the memory.

From the best of each kind of simple order a short search swaps and moves microbatches as long as it helps.  It draws
from a generator of its own: given the same weights, every rank finds the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from attrs import define, evolve, field

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.outline import Outline, PerStage
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.simulate import Costs
from pipeline_engine.plan.starts import Order, fitted_starts, frugal_starts, rising, starts, valley_starts

Judged = tuple[float, float]
"""Bytes over the budget, and seconds of the makespan by outline."""

Found = tuple[Judged, Order]

_TRIALS = 14
"""Orders that are judged for each microbatch of a schedule with one stage a rank and whole backwards; fewer if there is
more to look at.  Sixteen microbatches on four ranks take 5 ms in all."""

_FIRST = 0.25
"""What of the trials is spent on each kind of simple order, if there are two, before the better one gets the rest."""


def plan_order(
    schedule: Schedule,
    costs: Costs,
    *,
    memory_budget: float = math.inf,
    activation_bytes: PerStage = 1.0,
    effort: int = 1,
) -> Order:
    """Find a good order of uneven microbatches for one schedule.

    Args:
        schedule: computing verbs only.
        costs: seconds, with the weight of every microbatch.
        memory_budget: bytes that a rank may hold.
        activation_bytes: what a stage keeps of a microbatch of weight 1 until its backward is done; a number, or one
            for each stage.
        effort: how many times as long the search may take; worth it if memory is short.

    Returns:
        For each place in the schedule the microbatch that stands there.  If no order fits the budget that the search
        knows of, the one that exceeds it least.

    Raises:
        ScheduleError: the weights are not one for each microbatch, or the programs cannot reach their end.
    """
    weights = weights_of(costs, schedule.num_microbatches)
    outline = Outline.of(schedule, costs, activation_bytes)
    return search(outline, weights, memory_budget, effort)[1]


def weights_of(costs: Costs, num_microbatches: int) -> tuple[float, ...]:
    """The weight of every microbatch.

    Raises:
        ScheduleError: there are some, but not one for each.
    """
    if costs.weights and len(costs.weights) != num_microbatches:
        raise ScheduleError(f"{len(costs.weights)} weights are given for {num_microbatches} microbatches.")
    return costs.weights or (1.0,) * num_microbatches


def weighted(costs: Costs, weights: Iterable[float]) -> Costs:
    """The same costs for microbatches of these weights."""
    return evolve(costs, weights=weights)


def in_order(costs: Costs, order: Sequence[int]) -> Costs:
    """The same costs for microbatches that are numbered by place in ``order``."""
    return weighted(costs, [costs.weights[m] for m in order]) if costs.weights else costs


def best_start(outline: Outline, weights: Sequence[float], memory_budget: float) -> Found:
    """The best of the simple orders."""
    searching = _Search(outline, weights, memory_budget)
    return min(map(searching.best_of, _kinds(outline, weights, memory_budget)))


def search(outline: Outline, weights: Sequence[float], memory_budget: float, effort: int = 1) -> Found:
    """Improve the best simple orders step by step."""
    searching = _Search(outline, weights, memory_budget)
    found = [searching.best_of(kind) for kind in _kinds(outline, weights, memory_budget)]
    if len(set(weights)) > 1:
        halves = 2 * effort * _num_trials(outline) - searching.halves
        if len(found) > 1:
            found = [searching.improved(start, int(_FIRST * halves)) for start in found]
            halves -= len(found) * int(_FIRST * halves)
        found = [searching.improved(min(found), halves)]
    return min(found)


def _kinds(outline: Outline, weights: Sequence[float], memory_budget: float) -> list[list[Order]]:
    """Simple orders; those of one kind resemble each other."""
    simple = [*starts(weights)]
    if memory_budget == math.inf:
        return [simple]
    allowed = memory_budget / outline.whole_bytes if outline.whole_bytes else math.inf
    simple += [*frugal_starts(weights), *fitted_starts(weights, outline.window, allowed)]
    return [kind for kind in (simple, [*valley_starts(weights)]) if kind]


def _num_trials(outline: Outline) -> int:
    """As many as take about the same time for every schedule with these ranks and microbatches."""
    schedule = outline.schedule
    plain = 2 * schedule.graph.num_ranks * schedule.num_microbatches
    return _TRIALS * schedule.num_microbatches * plain // outline.num_rows


@define(eq=False)
class _Search:
    """Judges orders and changes them.

    Attributes:
        halves: half trials that were spent: one on the bytes of each order, and one on the makespan of those that fit.
    """

    outline: Outline
    weights: Sequence[float]
    memory_budget: float
    halves: int = 0
    _rising: Sequence[int] = field(init=False)
    _draws: Iterator[int] = field(init=False, factory=lambda: _draws())

    def __attrs_post_init__(self) -> None:
        self._rising = rising(self.weights)

    def best_of(self, orders: Sequence[Order]) -> Found:
        """The order with the least excess, and of those the quickest."""
        best, order = (math.inf, math.inf), orders[0]
        for candidate in orders:
            placed = self._placed(candidate)
            excess = self._excess(placed)
            if excess <= best[0]:
                judged = (excess, self.outline.last_of(self._ends(placed)))
                if judged < best:
                    best, order = judged, candidate
        return best, order

    def improved(self, found: Found, halves: int) -> Found:
        """Change one thing after the other, until so many half trials are spent."""
        best, order = found
        ends = self._ends(self._placed(order))
        end = self.halves + halves
        while self.halves < end:
            candidate, place = self._changed(order)
            placed = self._placed(candidate)
            excess = self._excess(placed)
            if excess <= best[0]:
                tried = self._ends(placed, ends, place)
                judged = (excess, self.outline.last_of(tried))
                if judged <= best:
                    best, order, ends = judged, candidate, tried
        return best, order

    def _placed(self, order: Order) -> list[float]:
        return [self.weights[m] for m in order]

    def _excess(self, placed: Sequence[float]) -> float:
        self.halves += 1
        return max(self.outline.peak(placed) - self.memory_budget, 0.0) if self.memory_budget < math.inf else 0.0

    def _ends(self, placed: Sequence[float], tried: Sequence[float] = (0.0,), place: int = 0) -> list[float]:
        self.halves += 1
        return self.outline.ends(placed, tried, place)

    def _changed(self, order: Order) -> tuple[Order, int]:
        """One change, near or anywhere, and the first place that it touches.

        Near: two of about the same size swapped, or one moved by up to three places.  Anywhere: two swapped, or up to
        four that follow each other moved.
        """
        changed, draws, last = list(order), self._draws, len(order) - 1
        kind = next(draws) % 6
        if kind < 3:
            here, there = self._alike(order) if kind < 2 else (next(draws) % len(order), next(draws) % len(order))
            changed[here], changed[there] = changed[there], changed[here]
        elif kind == 3:
            here = next(draws) % len(order)
            there = min(max(here + next(draws) % 7 - 3, 0), last)
            changed.insert(there, changed.pop(here))
        else:
            length = min(1 + next(draws) % 4, last) if kind == 4 else 1
            here, there = next(draws) % (len(order) - length + 1), next(draws) % (len(order) - length + 1)
            moved = changed[here : here + length]
            del changed[here : here + length]
            changed[there:there] = moved if next(draws) % 2 else reversed(moved)
        return tuple(changed), min(here, there)

    def _alike(self, order: Order) -> tuple[int, int]:
        """Where two stand that are of about the same size."""
        smaller = next(self._draws) % (len(order) - 1)
        larger = min(smaller + 1 + next(self._draws) % 3, len(order) - 1)
        return order.index(self._rising[smaller]), order.index(self._rising[larger])


def _draws() -> Iterator[int]:
    """Numbers that look random and are the same every time."""
    state = 1
    while True:
        state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        yield state >> 33
