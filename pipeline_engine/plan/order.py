"""Order: which microbatch comes when, so that uneven work leaves little idle time and fits the memory.

While a pipeline fills, every rank waits for the first microbatches to come through, and while it drains for the last
ones: small ones belong at both ends.  From that and a few other starts, a short search swaps and moves microbatches
as long as it helps.  It draws from a generator of its own: given the same weights, every rank finds the same order.
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

TRIALS = 120
"""Orders that a search tries: within 5 ms for 16 microbatches on 4 ranks."""


def plan_order(
    schedule: Schedule, costs: Costs, *, memory_budget: float = math.inf, activation_bytes: PerStage = 1.0
) -> Order:
    """Find a good order of uneven microbatches for one schedule.

    Args:
        schedule: computing verbs only.
        costs: seconds, with the weight of every microbatch.
        memory_budget: bytes that a rank may hold.
        activation_bytes: what a stage keeps of a microbatch of weight 1 until its backward is done; a number, or one
            for each stage.

    Returns:
        For each place in the schedule the microbatch that stands there.  If no order fits the budget that the search
        knows of, the one that exceeds it least.

    Raises:
        ScheduleError: the weights are not one for each microbatch, or the programs cannot reach their end.
    """
    weights = weights_of(costs, schedule.num_microbatches)
    outline = Outline.of(schedule, costs, activation_bytes)
    return search(outline, weights, memory_budget)[1]


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
    return evolve(costs, weights=tuple(weights))  # type: ignore[arg-type]


def in_order(costs: Costs, order: Sequence[int]) -> Costs:
    """The same costs for microbatches that are numbered by place in ``order``."""
    return weighted(costs, [costs.weights[m] for m in order]) if costs.weights else costs


def best_start(outline: Outline, weights: Sequence[float], memory_budget: float) -> tuple[tuple[float, float], Order]:
    """The best of the simple orders: bytes over the budget, makespan, and the order."""

    def judged(order: Order) -> tuple[float, float]:
        placed = [weights[m] for m in order]
        return _excess(outline, placed, memory_budget), outline.makespan(placed)

    return min((judged(order), order) for order in dict.fromkeys(starts(weights)))


def search(
    outline: Outline, weights: Sequence[float], memory_budget: float, trials: int = TRIALS
) -> tuple[tuple[float, float], Order]:
    """Improve the best start step by step; what comes out is as in ``best_start``."""
    best, order = best_start(outline, weights, memory_budget)
    if len(set(weights)) < 2:
        return best, order
    draws = _draws()
    for _ in range(trials):
        candidate = _changed(order, draws)
        placed = [weights[m] for m in candidate]
        excess = _excess(outline, placed, memory_budget)
        if excess <= best[0] and (judged := (excess, outline.makespan(placed))) <= best:
            best, order = judged, candidate
    return best, order


def starts(weights: Sequence[float]) -> Iterator[Order]:
    """Simple orders: as they come, smallest at both ends, sorted, and big beside small."""
    yield tuple(range(len(weights)))
    rising = sorted(range(len(weights)), key=weights.__getitem__)
    yield smallest_at_both_ends(weights)
    yield (*rising[1::2], *reversed(rising[0::2]))
    yield tuple(rising)
    yield tuple(reversed(rising))
    for head in (2, 4):
        yield (*rising[:head], *reversed(rising[head:]))
    pairs = zip(rising, reversed(rising), strict=True)
    yield tuple(place for pair in pairs for place in pair)[: len(weights)]


def smallest_at_both_ends(weights: Sequence[float]) -> Order:
    """The smallest first, the next smallest last, and so on towards the middle."""
    rising = sorted(range(len(weights)), key=weights.__getitem__)
    return (*rising[0::2], *reversed(rising[1::2]))


def _excess(outline: Outline, placed: Sequence[float], memory_budget: float) -> float:
    return max(outline.peak(placed) - memory_budget, 0.0) if memory_budget < math.inf else 0.0


def _changed(order: Order, draws: Iterator[int]) -> Order:
    """Swap two microbatches, or move one."""
    changed = list(order)
    here, there = next(draws) % len(order), next(draws) % len(order)
    if next(draws) % 2:
        changed[here], changed[there] = changed[there], changed[here]
    else:
        changed.insert(there, changed.pop(here))
    return tuple(changed)


def _draws() -> Iterator[int]:
    """Numbers that look random and are the same every time."""
    state = 1
    while True:
        state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        yield state >> 33
