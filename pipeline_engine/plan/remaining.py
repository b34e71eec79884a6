"""What is left of one rank's program, and what was passed over in it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from heapq import heappop, heappush

from attrs import define, field

from pipeline_engine.plan.actions import Compute, Forward


@define(eq=False)
class Remaining:
    """A program from its first action that is neither performed nor passed over.

    First come those that were passed over and are given now, or that were hurried, in program order; then those that
    are repeated.
    """

    program: list[Compute]
    _next: int = 0
    _again: list[Compute] = field(factory=list)  # performed before, and to be performed once more
    _passed: dict[int, list[int]] = field(factory=dict)  # by microbatch: steps of the program
    _ready: list[int] = field(factory=list)  # a heap of steps that were passed over and are given now, or hurried
    _hurried: set[int] = field(factory=set)  # steps that are not reached yet and were hurried

    @property
    def is_done(self) -> bool:
        """Whether nothing is left, passed over or not."""
        return self._next >= len(self.program) and not self._again and not self._passed and not self._ready

    def all(self) -> list[Compute]:
        """Everything that is left, in no order."""
        passed = (step for steps in self._passed.values() for step in steps)
        waiting = [self.program[step] for step in (*self._ready, *passed)]
        ahead = (step for step in range(self._next, len(self.program)) if step not in self._hurried)
        return [*self._again, *waiting, *(self.program[step] for step in ahead)]

    def head(self, passing: Collection[int], dropped: Collection[int]) -> Compute | None:
        """The first action that is left.

        Args:
            passing: microbatches whose backwards are passed over.
            dropped: microbatches of which nothing is left.
        """
        program = self.program
        if self._ready:
            return program[self._ready[0]]
        if self._again:
            return self._again[0]
        while self._next < len(program):
            action = program[self._next]
            if self._next in self._hurried:
                self._hurried.discard(self._next)
            elif action.microbatch in passing and type(action) is not Forward:
                self._passed.setdefault(action.microbatch, []).append(self._next)
            elif action.microbatch not in dropped:
                return action
            self._next += 1
        return None

    def extend(self, actions: Iterable[Compute]) -> None:
        """The program goes on with these."""
        self.program.extend(actions)

    def take(self) -> None:
        """The head is performed."""
        if self._ready:
            heappop(self._ready)
        elif self._again:
            del self._again[0]
        else:
            self._next += 1

    def give(self, microbatches: Collection[int]) -> None:
        """What was passed over of these is now to be performed first."""
        for microbatch in microbatches:
            for step in self._passed.pop(microbatch, ()):
                heappush(self._ready, step)

    def hurry(self, microbatches: Collection[int]) -> None:
        """The backwards that are left of these come before everything else."""
        for step in range(self._next, len(self.program)):
            action = self.program[step]
            if action.microbatch in microbatches and type(action) is not Forward and step not in self._hurried:
                self._hurried.add(step)
                heappush(self._ready, step)

    def drop(self, microbatches: Collection[int]) -> None:
        """Nothing more is to be performed of these."""
        self._again[:] = [action for action in self._again if action.microbatch not in microbatches]
        for microbatch in microbatches:
            self._passed.pop(microbatch, None)

    def repeat(self, actions: Collection[Compute]) -> None:
        """Perform these, which were performed before, once more."""
        self._again[:] = dict.fromkeys((*self._again, *actions))
