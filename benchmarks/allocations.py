"""Bytes that torch's CPU allocator has handed out: every tensor of this thread, whoever made it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

from attrs import define
from torch.profiler import ProfilerActivity, profile


@define
class Allocations:
    """What was allocated in a block and not freed in it again.

    Attributes:
        peak: the most bytes at once.
        left: bytes at the end.
    """

    peak: int = 0
    left: int = 0


@contextmanager
def counted() -> Iterator[Allocations]:
    """Count in this block; the figures are there when it has ended.

    What was allocated before does not count, nor does it when it is freed in the block.
    """
    found = Allocations()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    events = profiler.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    levels = [0, *accumulate(changes)]
    found.peak, found.left = max(levels), levels[-1]
