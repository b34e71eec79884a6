"""Partition: a list of layers cut into stages that cost about the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar

from pipeline_engine.errors import ScheduleError

Layer = TypeVar("Layer")


def split(
    layers: Sequence[Layer], stages: int, costs: Sequence[float] | Callable[[Layer], float] | None = None
) -> list[list[Layer]]:
    """Cut a list of layers into consecutive stages, so that the dearest stage is as cheap as possible.

    The embedding and the head are layers like any other: give them a cost.  Of several best cuts the one is taken
    whose later stages are the fuller ones, since a pipeline's last rank holds the fewest activations.

    Args:
        layers: in the order in which they run.
        stages: number of stages, at most the number of layers; each gets at least one.
        costs: seconds (or any other measure) of each layer, measured or guessed, or a function of a layer; by default
            all cost the same.

    Returns:
        for each stage its layers; every layer exactly once, in order.

    Raises:
        ScheduleError: more stages than layers, another number of costs than layers, or a cost that is no cost.
    """
    weights = _weights(layers, costs)
    if not 1 <= stages <= len(layers):
        raise ScheduleError(f"{len(layers)} layers cannot be cut into {stages} stages; each stage has one or more.")
    sums = [0.0, *accumulate(weights)]
    limit = _smallest_limit(sums, stages)
    cut = [list(layers[start:end]) for start, end in _bounds(sums, stages, limit)]
    assert [layer for stage in cut for layer in stage] == list(layers)
    return cut


def _weights(layers: Sequence[Layer], costs: Sequence[float] | Callable[[Layer], float] | None) -> list[float]:
    if costs is None:
        return [1.0 for _ in layers]
    weights = [float(costs(layer)) for layer in layers] if callable(costs) else [float(cost) for cost in costs]
    if len(weights) != len(layers):
        raise ScheduleError(f"{len(weights)} costs are given for {len(layers)} layers; each layer has one.")
    for number, weight in enumerate(weights):
        if not 0 <= weight < math.inf:
            raise ScheduleError(f"the cost of layer {number} is {weight}; a cost is a finite number, 0 or more.")
    return weights


def _smallest_limit(sums: Sequence[float], stages: int) -> float:
    """The smallest cost of the dearest stage: tried are the costs of all runs of layers, by bisection."""
    count = len(sums) - 1
    candidates = sorted({sums[end] - sums[start] for start in range(count) for end in range(start + 1, count + 1)})
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(sums, stages, candidates[middle]) else (middle + 1, high)
    return candidates[low]


def _fits(sums: Sequence[float], stages: int, limit: float) -> bool:
    """Whether ``stages`` stages of at most ``limit`` suffice; fewer may be cut further."""
    needed, start = 0, 0
    while start < len(sums) - 1:
        end = _furthest(sums, start, limit)
        if end == start:
            return False
        needed, start = needed + 1, end
    return needed <= stages


def _furthest(sums: Sequence[float], start: int, limit: float) -> int:
    end = start
    while end + 1 < len(sums) and sums[end + 1] - sums[start] <= limit:
        end += 1
    return end


def _bounds(sums: Sequence[float], stages: int, limit: float) -> list[tuple[int, int]]:
    """Fill the stages from the last one back, leaving at least one layer for each of the others."""
    bounds: list[tuple[int, int]] = []
    end = len(sums) - 1
    for left in range(stages - 1, -1, -1):
        start = end - 1
        while left and start > left and sums[end] - sums[start - 1] <= limit:
            start -= 1
        bounds.append((start if left else 0, end))
        end = start
    return bounds[::-1]
