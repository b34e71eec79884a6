"""Patterns that several pages share: one forward for each backward, and programs spelled letter by letter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from pipeline_engine.plan.actions import Backward, BackwardInput, BackwardWeight, Compute, Forward


def alternate(forwards: Iterable[Compute], backwards: Iterable[Compute], warmup: int) -> Iterator[Compute]:
    """``warmup`` forwards, then a forward before each backward as long as there are any."""
    forwards = iter(forwards)
    yield from islice(forwards, warmup)
    for backward in backwards:
        yield from islice(forwards, 1)
        yield backward


def spell(pattern: str, stages: tuple[int, ...], num_microbatches: int) -> Iterator[Compute]:
    """Actions from letters: capitals for a rank's first stage, small letters for its second.

    ``F`` is a forward, ``B`` a whole backward, ``I`` and ``W`` its halves.  Each letter counts its own microbatches
    up from 0; a ``B`` counts for ``I`` and ``W`` too, so weights follow their inputs in order.

    Note [padding]: a pattern may be written for more microbatches than there are.  Leaving theirs out takes nothing
    away that another microbatch needs, so what is left is as free of deadlocks as the whole.
    """
    first, second = stages
    for letter, microbatch in _numbered(pattern):
        if microbatch < num_microbatches:
            yield _VERBS[letter.upper()](first if letter.isupper() else second, microbatch)


_VERBS: dict[str, type[Forward] | type[Backward] | type[BackwardInput] | type[BackwardWeight]] = {
    verb.letter: verb for verb in (Forward, Backward, BackwardInput, BackwardWeight)
}
_COUNTS_FOR = {"B": "IW", "b": "iw"}


def _numbered(pattern: str) -> Iterator[tuple[str, int]]:
    counts: Counter[str] = Counter()
    for letter in pattern:
        counted = _COUNTS_FOR.get(letter, letter)
        yield letter, counts[counted[0]]
        counts.update(counted)
