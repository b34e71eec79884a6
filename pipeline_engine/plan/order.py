"""Order: which microbatch comes when, so that uneven work leaves little idle time and fits the memory.

While a pipeline fills, every rank waits for the first microbatches to come through, and while it drains for the last
ones: small ones belong at both ends.  Where memory is short, big ones must not follow each other either.  From the
best of a few such orders a short search swaps and moves microbatches as long as it helps.  It draws from a generator
of its own: given the same weights, every rank finds the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from attrs import evolve

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.outline import Outline, PerStage
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.simulate import Costs

Order = tuple[int, ...]
"""For each place in a schedule the microbatch that stands there."""

Judged = tuple[float, float]
"""Bytes over the budget, and seconds of the makespan by outline."""

_TRIALS, _FRUGAL_TRIALS = 9, 7
"""Orders that a search tries for each microbatch, without and with a budget: within 5 ms in all for 16 microbatches on
4 ranks."""


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
    simple = [*starts(weights), *(frugal_starts(weights) if memory_budget < math.inf else ())]
    return min((_judged(outline, [weights[m] for m in order], memory_budget), order) for order in dict.fromkeys(simple))


def search(outline: Outline, weights: Sequence[float], memory_budget: float, effort: int = 1) -> tuple[Judged, Order]:
    """Improve the best simple order step by step."""
    best, order = best_start(outline, weights, memory_budget)
    if len(set(weights)) < 2:
        return best, order
    draws = _draws()
    trials = effort * len(weights) * (_TRIALS if memory_budget == math.inf else _FRUGAL_TRIALS)
    for _ in range(trials):
        candidate = _changed(order, draws)
        placed = [weights[m] for m in candidate]
        if best[0] > 0:
            judged = _judged(outline, placed, memory_budget)
        elif outline.fits(placed, memory_budget):
            judged = (0.0, outline.makespan(placed))
        else:
            continue
        if judged <= best:
            best, order = judged, candidate
    return best, order


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
    """Orders in which big ones stand beside small ones: smallest at both ends, and the middle mixed.

    The larger the middle, the less memory and the more idle time.
    """
    rising = _rising(weights)
    for ends in range(0, len(rising) // 2, max(len(rising) // 8, 1)):
        outer, middle = rising[: 2 * ends], rising[2 * ends :]
        small, big = middle[: len(middle) // 2], middle[len(middle) // 2 :]
        big_within = _peaked(big)
        for mixed in (
            _alternating(_peaked(small), big_within),
            _alternating(_peaked(small[::-1]), big_within),
            _alternating(small, big[::-1]),
        ):
            yield (*outer[0::2], *mixed, *reversed(outer[1::2]))


def _rising(weights: Sequence[float]) -> list[int]:
    return sorted(range(len(weights)), key=weights.__getitem__)


def _peaked(rising: Sequence[int]) -> list[int]:
    return [*rising[0::2], *reversed(rising[1::2])]


def _alternating(small: Sequence[int], big: Sequence[int]) -> list[int]:
    """Small, big, small, big, ...; there may be one more of the big ones."""
    return [m for pair in zip(small, big, strict=False) for m in pair] + list(big[len(small) :])


def smallest_at_both_ends(weights: Sequence[float]) -> Order:
    """The smallest first, the next smallest last, and so on towards the middle."""
    return tuple(_peaked(_rising(weights)))


def _judged(outline: Outline, placed: Sequence[float], memory_budget: float) -> Judged:
    excess = 0.0 if outline.fits(placed, memory_budget) else outline.peak(placed) - memory_budget
    return excess, outline.makespan(placed)


def _changed(order: Order, draws: Iterator[int]) -> Order:
    """Swap two microbatches, move one, or turn a stretch round."""
    changed = list(order)
    here, there = next(draws) % len(order), next(draws) % len(order)
    match next(draws) % 3:
        case 0:
            changed[here], changed[there] = changed[there], changed[here]
        case 1:
            changed.insert(there, changed.pop(here))
        case _:
            stretch = slice(min(here, there), max(here, there) + 1)
            changed[stretch] = reversed(changed[stretch])
    return tuple(changed)


def _draws() -> Iterator[int]:
    """Numbers that look random and are the same every time."""
    state = 1
    while True:
        state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        yield state >> 33
