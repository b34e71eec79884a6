"""Search: a good order for one outline, from the best of each kind of simple order by small changes.

A change that leaves the longest path as long as it was cannot help.  So the paths of the orders tried so far, the best
one's first, tell of most changes that they lead to nothing, without a pass over the outline's table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import define, field

from pipeline_engine.plan.bounds import ROUNDING, Bounds
from pipeline_engine.plan.changes import Changes
from pipeline_engine.plan.outline import Outline
from pipeline_engine.plan.starts import Order, SimpleOrders

Judged = tuple[float, float]
"""Bytes over the budget, and seconds of the makespan by outline."""

Found = tuple[Judged, Order]

_TRIALS = 11
"""Orders that are tried for each microbatch of a schedule with one stage a rank and whole backwards; fewer if there is
more to look at.  Sixteen microbatches on four ranks take 3 ms in all."""

_FIRST = 0.25
"""What of the trials is spent on each kind of simple order, if there are two, before the better one gets the rest."""


@define(eq=False)
class Search:
    """One search; ``starts`` is the best of each kind of simple order.

    Attributes:
        halves: half trials that were spent: one on a look at each change, and one on a pass over those that no bound
            turned away.
    """

    outline: Outline
    simple: SimpleOrders
    memory_budget: float
    starts: list[Found] = field(init=False)
    halves: int = 0
    _rising: Sequence[float] = field(init=False)  # all weights
    _least: float = field(init=False)  # bytes over the budget that no order can undercut
    _is_short: bool = field(init=False)  # whether it depends on the order what fits
    _changes: Changes = field(init=False)
    _moments: Bounds = field(init=False, factory=Bounds)
    _paths: Bounds = field(init=False, factory=Bounds)

    def __attrs_post_init__(self) -> None:
        self._rising = sorted(self.simple.weights)
        low, high = self.outline.peaks_of_any_order(self._rising)
        self._least = max(low - self.memory_budget, 0.0)
        self._is_short = high > max(low * (1 + ROUNDING), self.memory_budget)
        self._changes = Changes.of(self.simple.weights)
        self.starts = [self._best_of(kind) for kind in self._kinds()]

    def best(self, effort: int = 1) -> Found:
        """Improve the best simple orders step by step."""
        found = self.starts
        if self._rising[:1] != self._rising[-1:]:
            halves = max(2 * effort * _num_trials(self.outline) - self.halves, 0)
            if len(found) > 1:
                found = [self._improved(start, int(_FIRST * halves)) for start in found]
                halves -= len(found) * int(_FIRST * halves)
            found = [self._improved(min(found), halves)]
        return min(found)

    def _kinds(self) -> list[list[Order]]:
        if not self._is_short:
            return [self.simple.plain]
        allowed = self.memory_budget / self.outline.whole_bytes
        fitted = self.simple.fitted(self.outline.window, allowed)
        return [kind for kind in ([*self.simple.plain, *self.simple.frugal, *fitted], self.simple.valleys) if kind]

    def _best_of(self, orders: Sequence[Order]) -> Found:
        """The order with the least excess, and of those the quickest."""
        best, order = (math.inf, math.inf), orders[0]
        for candidate in orders:
            if better := self._better(self._placed(candidate), best):
                best, order = better[0], candidate
        return best, order

    def _improved(self, found: Found, halves: int) -> Found:
        """Change one thing after the other, until so many half trials are spent."""
        best, order = found
        placed = self._placed(order)
        ends = self.outline.ends(placed)
        self._paths.add(self.outline.longest_path(placed, ends))
        end = self.halves + halves
        while self.halves < end:
            candidate, place = self._changes.drawn(order)
            if better := self._better(self._placed(candidate), best, ends, place):
                (best, ends), order = better, candidate
        return best, order

    def _better(
        self, placed: Sequence[float], best: Judged, ends: Sequence[float] = (0.0,), place: int = 0
    ) -> tuple[Judged, list[float]] | None:
        """What an order is worth that is better than ``best``, and when its rows end; otherwise None.

        Args:
            placed: the weights, by place in the order.
            best: what is to be undercut.
            ends: when the rows of an order end that is the same before ``place``.
            place: the first place at which it differs.
        """
        self.halves += 1
        if best[0] <= self._least and self._paths.exceed(placed, best[1] * (1 - ROUNDING)):
            return None
        excess = self._excess(placed, best[0]) if self._is_short else self._least
        if excess > best[0]:
            return None
        self.halves += 1
        ends = self.outline.ends(placed, ends, place)
        self._paths.add(self.outline.longest_path(placed, ends))
        judged = (excess, self.outline.last_of(ends))
        return (judged, ends) if judged < best else None

    def _excess(self, placed: Sequence[float], best: float) -> float:
        """Bytes over the budget; if they are more than ``best``, infinity will do."""
        if self._moments.exceed(placed, (self.memory_budget + best) * (1 + ROUNDING)):
            return math.inf
        excess = max(self.outline.peak(placed) - self.memory_budget, 0.0)
        if excess > best:
            self._moments.add(self.outline.fullest_moment(placed))
        return excess

    def _placed(self, order: Order) -> list[float]:
        weights = self.simple.weights
        return [weights[m] for m in order]


def _num_trials(outline: Outline) -> int:
    """As many as take about the same time for every schedule with these ranks and microbatches."""
    schedule = outline.schedule
    plain = 2 * schedule.graph.num_ranks * schedule.num_microbatches
    return _TRIALS * schedule.num_microbatches * plain // outline.num_rows
