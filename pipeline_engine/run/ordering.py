"""Ordering: which of the caller's microbatches stands at each place of the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

from pipeline_engine.errors import UsageError
from pipeline_engine.plan.order import plan_order, weighted
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.simulate import Costs
from pipeline_engine.run.microbatch import Microbatch

T = TypeVar("T")

Ordering = Literal["given", "planned"]


def check_ordering(ordering: str) -> Ordering:
    """The keyword, if it is one.

    Raises:
        UsageError: it is not.
    """
    if ordering == "given":
        return "given"
    if ordering == "planned":
        return "planned"
    raise UsageError(f"order is {ordering!r}; one of 'given', 'planned'.")


def ordered(
    microbatches: Iterable[Microbatch], schedule_for: Callable[[int], Schedule]
) -> tuple[Sequence[int], Sequence[Microbatch]]:
    """Plan the order of microbatches by their weights.

    Args:
        microbatches: all of them.
        schedule_for: the schedule for a number of microbatches.

    Returns:
        for each place the number of the microbatch that stands there, and the microbatches in that order.

    Raises:
        UsageError: ``microbatches`` is not a sequence.
    """
    if not isinstance(microbatches, Sequence):
        raise UsageError(
            f'order="planned" needs every weight beforehand: pass a sequence, not a {type(microbatches).__name__}.'
        )
    weights = [getattr(microbatch, "weight", 1.0) for microbatch in microbatches]
    order = plan_order(schedule_for(len(microbatches)), weighted(Costs(), weights))
    return order, [microbatches[number] for number in order]


def as_given(in_places: Sequence[T], order: Sequence[int]) -> list[T]:
    """What stands in places, by the caller's numbers."""
    return [each for _, each in sorted(zip(order, in_places, strict=True), key=lambda pair: pair[0])]
