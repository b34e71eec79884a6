"""Changes: small ones that a search makes to an order, drawn from a generator of its own.

Given the same weights, every rank draws the same changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import field, frozen

from pipeline_engine.plan.starts import Order, rising


@frozen(eq=False)
class Changes:
    """Draws changes of an order of these microbatches, ``rising`` in weight."""

    rising: Sequence[int]
    _draws: Iterator[int] = field(init=False, factory=lambda: _draws())

    @staticmethod
    def of(weights: Sequence[float]) -> Changes:
        return Changes(rising(weights))

    def drawn(self, order: Order) -> tuple[Order, int]:
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
        return order.index(self.rising[smaller]), order.index(self.rising[larger])


def _draws() -> Iterator[int]:
    """Numbers that look random and are the same every time."""
    state = 1
    while True:
        state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        yield state >> 33
