"""Order: which microbatch comes when, so that uneven work leaves little idle time and fits the memory.

While a pipeline fills, every rank waits for the first microbatches to come through, and while it drains for the last
ones: small ones belong at both ends.  Where memory is short, a few small ones must part the biggest.  From the
best of a few such orders a short search swaps and moves microbatches as long as it helps.  It draws from a generator
of its own: given the same weights, every rank finds the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from attrs import evolve

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.outline import Outline, PerStage
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.simulate import Costs

Order = tuple[int, ...]
"""For each place in a schedule the microbatch that stands there."""

Judged = tuple[float, float]
"""Bytes over the budget, and seconds of the makespan by outline."""

_TRIALS = 14
"""Orders that are tried for each microbatch of a schedule with one stage a rank and whole backwards, the simple ones
among them; fewer if there is more to look at.  Sixteen microbatches on four ranks take 5 ms in all."""


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


def best_start(outline: Outline, weights: Sequence[float], memory_budget: float) -> tuple[Judged, Order]:
    """The best of the simple orders."""
    simple = _simple(weights, memory_budget)
    best, order = (math.inf, math.inf), simple[0]
    for candidate in simple:
        placed = [weights[m] for m in candidate]
        excess = _excess(outline, placed, memory_budget)
        if excess <= best[0] and (judged := (excess, outline.makespan(placed))) < best:
            best, order = judged, candidate
    return best, order


def search(outline: Outline, weights: Sequence[float], memory_budget: float, effort: int = 1) -> tuple[Judged, Order]:
    """Improve the best simple order step by step."""
    best, order = best_start(outline, weights, memory_budget)
    if len(set(weights)) < 2:
        return best, order
    ends, draws = outline.ends([weights[m] for m in order]), _draws()
    for _ in range(effort * _num_trials(outline) - len(_simple(weights, memory_budget))):
        candidate, place = _changed(order, draws)
        placed = [weights[m] for m in candidate]
        excess = _excess(outline, placed, memory_budget)
        if excess <= best[0]:
            tried = outline.ends(placed, ends, place)
            judged = (excess, outline.last_of(tried))
            if judged <= best:
                best, order, ends = judged, candidate, tried
    return best, order


def _simple(weights: Sequence[float], memory_budget: float) -> list[Order]:
    simple = [*starts(weights), *(frugal_starts(weights) if memory_budget < math.inf else ())]
    return list(dict.fromkeys(simple))


def _num_trials(outline: Outline) -> int:
    """As many as take about the same time for every schedule with these ranks and microbatches."""
    schedule = outline.schedule
    plain = 2 * schedule.graph.num_ranks * schedule.num_microbatches
    return _TRIALS * schedule.num_microbatches * plain // outline.num_rows


def starts(weights: Sequence[float]) -> Iterator[Order]:
    """Simple orders: as they come, smallest at both ends, sorted, and sorted behind the smallest."""
    yield tuple(range(len(weights)))
    rising = _rising(weights)
    yield smallest_at_both_ends(weights)
    yield (*rising[1::2], *reversed(rising[0::2]))
    yield tuple(rising)
    yield tuple(reversed(rising))
    for head in (2, 4):
        yield (*rising[:head], *reversed(rising[head:]))


def frugal_starts(weights: Sequence[float]) -> Iterator[Order]:
    """Smallest at both ends, but for a few small ones that stand between the biggest, one by one or in pairs.

    The more they are, and the smaller, the less memory is held at once and the more idle time is left.
    """
    rising = _rising(weights)
    count = len(rising)
    for smallest in range(0, count // 2, max(count // 8, 1)):
        for number in range(1, count // 2 + 1, max(count // 16, 1)):
            few, others = rising[smallest : smallest + number], rising[:smallest] + rising[smallest + number :]
            yield _parted(_peaked(others), _peaked(few[::-1]), run=2 - number % 2)


def _rising(weights: Sequence[float]) -> list[int]:
    return sorted(range(len(weights)), key=weights.__getitem__)


def _peaked(rising: Sequence[int]) -> list[int]:
    return [*rising[0::2], *reversed(rising[1::2])]


def _parted(hill: Sequence[int], few: Sequence[int], run: int) -> Order:
    """The few stand between those at the top of the hill: ``run`` of these, ``run`` of those."""
    between = (len(few) - 1) // run * run
    top = (len(hill) + 1 - between) // 2
    parts = [part for at in range(0, len(few), run) for part in (few[at : at + run], hill[top + at : top + at + run])]
    return (*hill[:top], *chain.from_iterable(parts), *hill[top + len(few) :])


def smallest_at_both_ends(weights: Sequence[float]) -> Order:
    """The smallest first, the next smallest last, and so on towards the middle."""
    return tuple(_peaked(_rising(weights)))


def _excess(outline: Outline, placed: Sequence[float], memory_budget: float) -> float:
    return max(outline.peak(placed) - memory_budget, 0.0) if memory_budget < math.inf else 0.0


def _changed(order: Order, draws: Iterator[int]) -> tuple[Order, int]:
    """Swap two microbatches, or move up to four that follow each other; and the first place that changes."""
    changed = list(order)
    kind = next(draws) % 3
    if kind == 0:
        here, there = next(draws) % len(order), next(draws) % len(order)
        changed[here], changed[there] = changed[there], changed[here]
    else:
        length = 1 if kind == 1 else min(1 + next(draws) % 4, len(order))
        here, there = next(draws) % (len(order) - length + 1), next(draws) % (len(order) - length + 1)
        moved = changed[here : here + length]
        del changed[here : here + length]
        changed[there:there] = moved if next(draws) % 2 else reversed(moved)
    return tuple(changed), min(here, there)


def _draws() -> Iterator[int]:
    """Numbers that look random and are the same every time."""
    state = 1
    while True:
        state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        yield state >> 33
