"""Waves that are planned but have not run, and how many of them may run ahead of the caller.

A trainer plans its windows one after the other, and talks to all ranks about each.  If ranks did that between two
windows they would wait for one another and the pipeline would run empty; so several are planned at a time, see
``Horizon``.  Which of them may run is another matter: as many as fit in the memory beside what waits for its backward.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

import pipeline_engine as pe

from .memory_watch import WaveMemory
from .stages import Group

MOST_AT_A_TIME = 64


@attrs.define(eq=False)
class Wave:
    """A forward that is planned: what the trainer hands to its caller at once.

    Attributes:
        result: the trainer's own, with placeholders for outputs; None if it had nothing more to plan.
        plan: the trainer's own, cut into groups that are microbatches.
        groups: those that are to run.
        check: what it estimates: ``estimated_required_bytes`` and ``available_bytes``, the same on all ranks.
        memory: takes note of what its groups take here, once all of them are known.
        before: bytes that waves before it keep here while it is planned, and will have given back when it runs.
        room: bytes for it and for all that is kept beside it, the same on all ranks.
        shortage: the trainer's own memory error.
    """

    result: Any = None
    plan: Any = None
    groups: list[Group] = attrs.field(factory=list)
    check: Any = None
    memory: WaveMemory | None = None
    before: int = 0
    room: float = 0.0
    shortage: type[Exception] = MemoryError

    @property
    def tokens(self) -> int:
        """Of all its packed rows."""
        return sum(group.tokens for group in self.groups)

    @property
    def differentiates(self) -> bool:
        """Whether a backward may follow."""
        return any(group.differentiates for group in self.groups)

    def run_piece(self, run: Callable[[], Any]) -> Any:
        """Run a forward of one of the groups.

        Raises:
            Exception: of the type ``shortage``: the device's memory was not enough.
        """
        try:
            return run() if self.memory is None else self.memory.measure(run)
        except torch.OutOfMemoryError as error:
            raise self.shortage(
                f"a deferred forward ran out of memory although the estimate fitted: packed_tokens={self.tokens} "
                f"microbatches={len(self.groups)} estimated_required_bytes={self.check.estimated_required_bytes} "
                f"available_bytes={self.check.available_bytes}; pass fewer or shorter inputs"
            ) from error


@attrs.define
class Horizon:
    """How many windows are planned at a time.

    As many as were used since the last change of what they depend on, twice as many each time that nothing changed:
    a caller who steps in every window plans each window once, and one who does not hardly ever meets the other ranks.
    """

    size: int = MOST_AT_A_TIME

    def used(self) -> None:
        """All that were planned have been used."""
        self.size = min(2 * self.size, MOST_AT_A_TIME)

    def changed(self, used: int) -> None:
        """After so many, the rest is of no use."""
        self.size = min(max(1, used), MOST_AT_A_TIME)


@attrs.frozen
class Room:
    """What a wave occupies on a rank, and what there is.

    A trainer may estimate for the whole model, against memory that is always the same; or for this rank, from what it
    has measured, against what is left at the moment.

    Attributes:
        share: of the estimate, that of the largest stage: 1 if the estimate is for this rank.
        boundary: bytes per token of a packed row that the estimate leaves out: what crosses into and out of a stage.
        is_what_is_left: whether what the trainer calls available leaves out what waits for a backward.
    """

    share: float
    boundary: float
    is_what_is_left: bool

    def needed_by(self, wave: Wave) -> float:
        """Bytes on the fullest rank."""
        return self.share * int(wave.check.estimated_required_bytes) + self.boundary * wave.tokens


class Line:
    """The waves of one loop, from their planning to the caller's hands.

    Args:
        begin: begins the call that runs them, and so ends the one before: what had run ahead in it is freed.
        room: what they occupy.

    Attributes:
        fewest: when there are fewer waves than this, more are to be planned.
    """

    fewest = 1

    def __init__(self, begin: Callable[[], pe.Waves], room: Room) -> None:
        self._call = begin()
        self._room = room
        self._planned: deque[Wave] = deque()  # not taken yet; the first ones may run
        self._taken: list[float] = []  # bytes that each wave keeps until its backward

    def __len__(self) -> int:
        return len(self._planned)

    def add(self, wave: Wave) -> None:
        """A wave was planned, beside what the caller holds now."""
        wave.room = wave.check.available_bytes + (self._held if self._room.is_what_is_left else 0.0)
        self._planned.append(wave)

    @property
    def ahead_here(self) -> int:
        """Bytes that waves which have run ahead keep on this rank, where that is measured."""
        return sum(wave.memory.kept for wave in self._planned if wave.memory is not None)

    @property
    def is_crowded(self) -> bool:
        """Whether the caller has come to hold memory for which the next wave was planned.

        Then it is to be planned again, as a trainer on one stage would only plan it now.
        """
        if not self._room.is_what_is_left or not self._planned:
            return False
        wave = self._planned[0]
        return self._held + self._room.needed_by(wave) > wave.room

    def take(self) -> tuple[Wave, Iterator[Any]]:
        """The next wave, and its groups' outputs."""
        self._let_run()
        wave = self._planned.popleft()
        self._taken.append(self._room.needed_by(wave) if wave.differentiates else 0.0)
        return wave, iter(self._call.take())

    def end(self) -> None:
        """The caller takes no more."""
        self._call.end()

    @property
    def _held(self) -> float:
        """Bytes of what was taken and waits for its backward."""
        return math.fsum(self._taken[number] for number in self._call.open)

    def _let_run(self) -> None:
        """The next wave in any case; those behind it as far as they fit beside all that is kept."""
        kept = self._held
        for place, wave in enumerate(self._planned):
            kept += self._room.needed_by(wave)
            if place and kept > wave.room:
                return
            if place >= self._call.waiting:
                self._call.add([group.microbatch for group in wave.groups])
