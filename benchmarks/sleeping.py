"""A stage that sleeps: its forward and the halves of its backward take known seconds and leave the core to others.

On a machine with fewer cores than ranks this is how a schedule shows: ranks that sleep do overlap.
"""

from __future__ import annotations

import time
import zlib
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

import pipeline_engine as pe

SECONDS_AWAKE = 0.0002  # ``time.sleep`` overshoots by about that much


_SOMETHING = bytes(1 << 15)


def nap(seconds: float, *, awake: bool = False) -> None:
    """Let ``seconds`` pass, to a few microseconds; zero returns at once.  ``awake``: the core computes meanwhile."""
    end = time.perf_counter() + seconds
    if seconds > SECONDS_AWAKE and not awake:
        time.sleep(seconds - SECONDS_AWAKE)
    while time.perf_counter() < end:
        if awake:
            zlib.crc32(_SOMETHING)  # 10 us or so, without the interpreter's lock


@define
class Naps:
    """How long a stage sleeps, in seconds, and how long its own code took, naps included.

    Attributes:
        forward, backward_input, backward_weight: for a microbatch; zero, the default, is the empty stage.
        rows: of a microbatch that takes that long, others in proportion; 0 if rows make no difference.
        awake: whether it computes instead of sleeping; then ranks overlap only where each has a core to itself.
        took: seconds of each piece of work by the letter of its verb, in order; a whole backward is one, ``"B"``.
    """

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    rows: float = 0.0
    awake: bool = False
    took: dict[str, list[float]] = field(factory=dict)

    def take(self, letter: str, rows: int) -> None:
        nap(self._seconds(letter) * (rows / self.rows if self.rows else 1.0), awake=self.awake)

    def note(self, letter: str, start: float) -> None:
        """A piece of work that began at ``start`` ends here."""
        self.took.setdefault(letter, []).append(time.perf_counter() - start)

    def _seconds(self, letter: str) -> float:
        halves = {"I": self.backward_input, "W": self.backward_weight}
        return {"F": self.forward, "B": sum(halves.values()), **halves}[letter]


@pe.splits_backward(weights=[1])
class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, bias: Tensor, naps: Naps) -> Tensor:
        start = time.perf_counter()
        ctx.naps = naps
        naps.take("F", len(hidden))
        shifted = hidden + bias
        naps.note("F", start)
        return shifted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        start, (for_hidden, for_bias) = time.perf_counter(), ctx.needs_input_grad[:2]
        if not (for_hidden or for_bias):
            return None, None, None
        letter = "B" if for_hidden and for_bias else "I" if for_hidden else "W"
        ctx.naps.take(letter, len(grads[0]))
        made = grads[0] * 1.0 if for_hidden else None, grads[0].sum(0) if for_bias else None, None
        ctx.naps.note(letter, start)
        return made


class Sleeping(nn.Module):
    """Adds a trained bias and naps.

    hidden: ``[rows, width]``, float32. The first stage, too, makes a gradient for it: all stages do the same work.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))
        self.naps = Naps()

    def forward(self, hidden: Tensor) -> Tensor:
        if not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()
        return self.work(hidden)

    def work(self, hidden: Tensor) -> Tensor:
        shifted: Tensor = _Work.apply(hidden, self.bias, self.naps)  # type: ignore[no-untyped-call]
        return shifted


class SleepingInTwo(Sleeping):
    """The same for an engine that splits a backward between nodes, not within one: each half is a node of its own."""

    def work(self, hidden: Tensor) -> Tensor:
        shifted: Tensor = _InputHalf.apply(hidden, self.naps) + _WeightHalf.apply(self.bias, self.naps, len(hidden))  # type: ignore[no-untyped-call]
        return shifted


class _InputHalf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, naps: Naps) -> Tensor:
        start = time.perf_counter()
        ctx.naps = naps
        naps.take("F", len(hidden))
        fresh = hidden * 1.0
        naps.note("F", start)
        return fresh

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        start = time.perf_counter()
        ctx.naps.take("I", len(grads[0]))
        made = grads[0] * 1.0
        ctx.naps.note("I", start)
        return made, None


class _WeightHalf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, naps: Naps, rows: int) -> Tensor:
        ctx.naps, ctx.rows = naps, rows
        return bias * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        start = time.perf_counter()
        ctx.naps.take("W", ctx.rows)
        made = grads[0] * 1.0
        ctx.naps.note("W", start)
        return made, None, None
