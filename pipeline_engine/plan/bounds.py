"""Bounds: what orders that were tried tell about orders that were not.

The longest path through a schedule is a sum: for each place in the order some seconds per unit of the weight that
stands there, and the seconds of its messages.  Whatever stands there, the makespan is no shorter than that sum.  And no
order holds less at its peak than it holds at the moment that was fullest for another.  A sum takes a tenth of the time
of a pass over an outline's table, and a few of them turn away most of the changes that lead to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

from attrs import define, field

Bound = tuple[float, ...]
"""For each place so much per unit of the weight that stands there, and at last what does not depend on weights."""

ROUNDING = 1e-9
"""By how much, relatively, two sums of the same numbers may differ."""

_KEPT = 8


@define(eq=False)
class Bounds:
    """The bounds that turned something away last."""

    _kept: list[Bound] = field(factory=list)

    def add(self, bound: Bound) -> None:
        self._kept.insert(0, bound)
        del self._kept[_KEPT:]

    def exceed(self, weights: Sequence[float], limit: float) -> bool:
        """Whether some bound is over the limit, with ``weights`` by place in the order."""
        for number, bound in enumerate(self._kept):
            if sum(map(mul, bound, weights), bound[-1]) > limit:
                if number:
                    self._kept.insert(0, self._kept.pop(number))
                return True
        return False
