"""A stage that sleeps: its forward and backward take known seconds and leave the core to others.

On a machine with fewer cores than ranks this is how a schedule shows: ranks that sleep do overlap.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

SECONDS_AWAKE = 0.0002  # ``time.sleep`` overshoots by about that much


def nap(seconds: float) -> None:
    """Let ``seconds`` pass, to a few microseconds; zero returns at once."""
    end = time.perf_counter() + seconds
    if seconds > SECONDS_AWAKE:
        time.sleep(seconds - SECONDS_AWAKE)
    while time.perf_counter() < end:
        pass


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, stage: Sleeping) -> Tensor:
        ctx.stage = stage
        start = time.perf_counter()
        nap(stage.forward_seconds)
        napped = hidden * 1.0
        stage.forwards.append(time.perf_counter() - start)
        return napped

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        start = time.perf_counter()
        nap(ctx.stage.backward_seconds)
        napped = grad * 1.0
        ctx.stage.backwards.append(time.perf_counter() - start)
        return napped, None


class Sleeping(nn.Module):
    """Adds a trained bias and naps; with zero seconds, the default, it is the empty stage.

    hidden: ``[rows, width]``, float32. Its backward naps also when ``hidden`` needs no gradient. What each forward and
    backward took, in seconds, is in ``forwards`` and ``backwards``, in order.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))
        self.forward_seconds = 0.0
        self.backward_seconds = 0.0
        self.forwards: list[float] = []
        self.backwards: list[float] = []

    def forward(self, hidden: Tensor) -> Tensor:
        shifted: Tensor = _Nap.apply(hidden + self.bias, self)
        return shifted
