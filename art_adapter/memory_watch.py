"""How much memory a forward really took, for a trainer that plans by what it has measured.

A trainer measures around its forward; a deferred one runs later, a piece at a time, between pieces of other waves.
Each piece is measured by itself, and a wave is told the peak that its pieces, run in a row, would have had.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import torch

T = TypeVar("T")


class DeviceMemory:
    """The allocator of a CUDA device; on any other nothing is measured, as a trainer does there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def is_measured(self) -> bool:
        return self._device.type == "cuda"

    def allocated(self) -> int:
        """Bytes now; from here on the peak counts."""
        torch.cuda.reset_peak_memory_stats(self._device)
        return int(torch.cuda.memory_allocated(self._device))

    def peak(self) -> int:
        """The most bytes since ``allocated`` was last asked."""
        return int(torch.cuda.max_memory_allocated(self._device))


@attrs.define(eq=False)
class WaveMemory:
    """What the pieces of one wave took on this rank.

    Args:
        memory: of the device.
        pieces: how many there are.
        beside: bytes that the wave takes here and its pieces do not allocate: outputs of another stage.
        report: called with the wave's peak in bytes once every piece has run.

    Attributes:
        kept: bytes that those of its pieces which have run keep for their backward.
    """

    memory: Any
    pieces: int
    beside: int
    report: Callable[[int], object]
    kept: int = attrs.field(init=False, default=0)
    _peak: int = attrs.field(init=False, default=0)

    def measure(self, run: Callable[[], T]) -> T:
        """Run one piece."""
        if not self.memory.is_measured or not self.pieces:
            return run()
        before = self.memory.allocated()
        result = run()
        self._peak = max(self._peak, self.kept + self.memory.peak() - before)
        self.kept += self.memory.allocated() - before
        self.pieces -= 1
        if not self.pieces:
            self.report(self._peak + self.beside)
        return result
