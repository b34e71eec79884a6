"""Starts: simple orders of uneven microbatches, for a search to begin with.

    as packed                3 8 1 6 2 7 5 4
    smallest at both ends    1 3 5 7 8 6 4 2
    frugal                   1 4 6 8 2 7 5 3
    fitted                   3 7 8 2 1 6 5 4      at most 20 in any four places
    valley                   4 6 1 7 8 2 3 5

While a pipeline fills, every rank waits for the first microbatches to come through, and while it drains for the last
ones: small ones belong at both ends.  Where memory is short, small ones must stand beside the biggest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, cycle, product

from attrs import frozen

Order = tuple[int, ...]
"""For each place in a schedule the microbatch that stands there."""


@frozen(eq=False, slots=False)
class SimpleOrders:
    """All simple orders of these weights; what suits every schedule is worked out once."""

    weights: Sequence[float]

    @cached_property
    def plain(self) -> list[Order]:
        return _different(starts(self.weights))

    @cached_property
    def frugal(self) -> list[Order]:
        return _different(frugal_starts(self.weights))

    @cached_property
    def valleys(self) -> list[Order]:
        return _different(valley_starts(self.weights))

    def fitted(self, window: int, allowed: float) -> list[Order]:
        return _different(fitted_starts(self.weights, window, allowed))


def _different(orders: Iterable[Order]) -> list[Order]:
    """Each order once."""
    return list(dict.fromkeys(orders))


def starts(weights: Sequence[float]) -> Iterator[Order]:
    """As they come, smallest at both ends, sorted, and sorted behind the smallest."""
    yield tuple(range(len(weights)))
    by_weight = rising(weights)
    yield smallest_at_both_ends(weights)
    yield (*by_weight[1::2], *reversed(by_weight[0::2]))
    yield tuple(by_weight)
    yield tuple(reversed(by_weight))
    for head in (2, 4):
        yield (*by_weight[:head], *reversed(by_weight[head:]))


def smallest_at_both_ends(weights: Sequence[float]) -> Order:
    """The smallest first, the next smallest last, and so on towards the middle."""
    return tuple(_peaked(rising(weights)))


def frugal_starts(weights: Sequence[float]) -> Iterator[Order]:
    """Smallest at both ends, but for a few small ones that stand between the biggest, one by one or in pairs.

    The more they are, and the smaller, the less memory is held at once and the more idle time is left.
    """
    by_weight = rising(weights)
    count = len(by_weight)
    for smallest in range(0, count // 2, max(count // 8, 1)):
        for number in range(1, count // 2 + 1, max(count // 16, 1)):
            few, others = by_weight[smallest : smallest + number], by_weight[:smallest] + by_weight[smallest + number :]
            yield _parted(_peaked(others), _peaked(few[::-1]), run=2 - number % 2)


def fitted_starts(weights: Sequence[float], window: int, allowed: float) -> Iterator[Order]:
    """From the biggest outwards, each the biggest that fits in a window beside small ones.

    Args:
        weights: of each microbatch.
        window: how many places a rank holds at once.
        allowed: the weight that may stand in a window.
    """
    count = len(weights)
    if count > 1:
        for spared, ratio in product((0, count // 8, count // 4), (2, 5, count)):
            yield _fitted(weights, window, allowed, spared, ratio)


def _fitted(weights: Sequence[float], window: int, allowed: float, spared: int, ratio: int) -> Order:
    """Beside the biggest one on the left, then ``ratio`` on the right for each on the left.

    Room is left for as many small ones as the window has places, the ``spared`` smallest not among them.
    """
    left = rising(weights)
    order = [left.pop(-2)]
    sides = chain((True, False), cycle((*[True] * ratio, False)))
    while left:
        on_the_right = next(sides)
        near = (order[::-1] if on_the_right else order)[: window - 1]
        small = left[spared : spared + window - 1 - len(near)]
        room = allowed - sum(weights[m] for m in chain(near, small))
        fitting = bisect_right(left, room, key=weights.__getitem__)
        order.insert(len(order) if on_the_right else 0, left.pop(max(fitting - 1, 0)))
    return tuple(order)


def valley_starts(weights: Sequence[float]) -> Iterator[Order]:
    """Up a hill, the smallest, the biggest side by side, a few small ones, and down another hill."""
    by_weight = rising(weights)
    for top, behind in product((1, 2, 3), (2, 3)):
        small, others, biggest = by_weight[: 1 + behind], by_weight[1 + behind : -top], by_weight[-top:]
        if others:
            yield (*others[0::2], small[0], *biggest, *small[1:], *reversed(others[1::2]))


def rising(weights: Sequence[float]) -> list[int]:
    """All microbatches, the smallest first."""
    return sorted(range(len(weights)), key=weights.__getitem__)


def _peaked(by_weight: Sequence[int]) -> list[int]:
    return [*by_weight[0::2], *reversed(by_weight[1::2])]


def _parted(hill: Sequence[int], few: Sequence[int], run: int) -> Order:
    """The few stand between those at the top of the hill: ``run`` of these, ``run`` of those."""
    between = (len(few) - 1) // run * run
    top = (len(hill) + 1 - between) // 2
    parts = [part for at in range(0, len(few), run) for part in (few[at : at + run], hill[top + at : top + at + run])]
    return (*hill[:top], *chain.from_iterable(parts), *hill[top + len(few) :])
