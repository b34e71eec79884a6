"""Randomness: the states of torch's default generators, so that forwards draw the same numbers however they are run.

A forward that is run again draws what it drew the first time.  With ``rng="per-microbatch"`` each microbatch begins
with a state of its own, which travels from stage to stage with the activation.

Note [one thread at a time at a state]: torch reads a state while it holds the generator's own lock, and makes a Python
object of it there.  That may start the garbage collector, which lets other threads run; and one of those that asks for
the state as well waits for the generator's lock and lets nobody run.  So threads wait here, for a lock of Python's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock, RLock
from typing import Literal

import torch
from attrs import define, field, frozen

from pipeline_engine.errors import UsageError
from pipeline_engine.plan.graph import StageGraph

Rng = Literal["per-microbatch"] | None

_GENERATORS = RLock()
"""Threads of one process share torch's default generators: while a microbatch's state is set, no other may draw."""

_STATES = Lock()
"""Held while a state is read or set, and inside of it no other lock; see Note [one thread at a time at a state]."""


@frozen(eq=False)
class RandomState:
    """States of the CPU's generator and, once CUDA is in use, of the current device's."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def now(cls) -> RandomState:
        """A copy of the present states."""
        with _STATES:
            return cls(torch.get_rng_state(), torch.cuda.get_rng_state() if _cuda_is_in_use() else None)

    def restore(self) -> None:
        """Set the generators to these states."""
        cpu = self.cpu.clone()  # torch 2.13 crashes on a state that begins in the middle of a buffer
        with _STATES:
            torch.set_rng_state(cpu)
            if self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Run the body from these states on, and leave the generators as they were before."""
        outer = RandomState.now()
        self.restore()
        try:
            yield
        finally:
            outer.restore()

    def is_that_of(self, other: RandomState) -> bool:
        """Whether nothing was drawn in between."""
        return torch.equal(self.cpu, other.cpu) and (
            (self.cuda is other.cuda) if self.cuda is None or other.cuda is None else torch.equal(self.cuda, other.cuda)
        )


@define(eq=False)
class Turns:
    """Who may draw while ranks are threads of one process.

    A stage that draws has the generators to itself, in its forwards, and in its backwards, which may run forwards
    again.  Whether it draws is seen in its first forward of a call, for which every stage has them, and in all others.
    What callers draw in their own code is not seen.
    """

    _draws: dict[int, bool] = field(init=False, factory=dict)

    @contextmanager
    def of_forward(self, stage: int) -> Iterator[None]:
        """Around a forward of this stage."""
        with alone() if self._draws.get(stage, True) else nullcontext():
            before = RandomState.now()
            yield
            self._draws[stage] = self._draws.get(stage, False) or not before.is_that_of(RandomState.now())

    def of_backward(self, stage: int) -> AbstractContextManager[object]:
        """Around a backward of this stage."""
        return alone() if self._draws.get(stage, True) else nullcontext()


def _cuda_is_in_use() -> bool:
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return in_use


def is_per_microbatch(rng: Rng, graph: StageGraph) -> bool:
    """Whether each microbatch has random numbers of its own.

    Raises:
        UsageError: an unknown keyword, or a graph in which two states would meet.
    """
    if rng is None:
        return False
    if rng != "per-microbatch":
        raise UsageError(f"rng is {rng!r}; None or 'per-microbatch'.")
    if joins := [stage for stage in range(graph.num_stages) if len(graph.before(stage)) > 1]:
        raise UsageError(f"rng='per-microbatch': stage {joins[0]} joins several inputs, whose random states differ.")
    return True


def draw_seed() -> int:
    """A seed for all microbatches of a call, from the caller's generator."""
    with alone():
        return int(torch.randint(2**62, (), device="cpu"))


def alone() -> AbstractContextManager[bool]:
    """A context in which no other thread draws: a backward that recomputes a forward sets its state for a while."""
    return _GENERATORS


def state_of(seed: int, microbatch: int) -> tuple[torch.Tensor, ...]:
    """The states with which a microbatch begins."""
    digest = hashlib.sha256(f"{seed}:{microbatch}".encode()).digest()
    own = int.from_bytes(digest[:7], "big")
    states = [torch.Generator().manual_seed(own).get_state()]
    if _cuda_is_in_use():
        states.append(torch.Generator("cuda").manual_seed(own).get_state())
    return tuple(states)


@contextmanager
def carried(states: tuple[torch.Tensor, ...]) -> Iterator[Callable[[], tuple[torch.Tensor, ...]]]:
    """Run the body from these states on; it may ask for the states that it has come to."""

    def now() -> tuple[torch.Tensor, ...]:
        state = RandomState.now()
        return (state.cpu,) if state.cuda is None else (state.cpu, state.cuda)

    with _GENERATORS, RandomState(states[0], states[1] if len(states) > 1 else None).replayed():
        yield now
