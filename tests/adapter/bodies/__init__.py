"""What callers do with a TrainerRank: one function per promise of its API, the same over every host and every cut.

A body notes what it sees; the suite compares what was seen on one stage with what was seen on several. Bodies also
assert what must hold on any number of stages.
"""

from __future__ import annotations

from . import outputs, slots, steps, weights, windows
from .registry import BODIES

__all__ = ["BODIES", "outputs", "slots", "steps", "weights", "windows"]
