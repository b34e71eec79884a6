"""Order: which microbatch comes when, so that uneven work leaves little idle time and fits the memory.

From the best of each kind of simple order a short search swaps and moves microbatches as long as it helps.  Nothing is
left to chance: given the same weights, every rank finds the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from attrs import evolve

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.outline import Outline, PerStage
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.search import Search
from pipeline_engine.plan.simulate import Costs
from pipeline_engine.plan.starts import Order, SimpleOrders


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
    return Search(outline, SimpleOrders(weights), memory_budget).best(effort)[1]


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
