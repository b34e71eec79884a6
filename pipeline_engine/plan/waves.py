"""Waves: a call whose microbatches are announced while it runs, some at a time, and handed out some at a time.

    1f1b, 2 ranks, waves of 2          rank 0   0F0 0F1 0F2 0F3 0B0 0B1 0F4 0F5 0B2 0B3 0B4 0B5
                                       rank 1   1F0 1F1 1B0 1B1 1F2 1F3 1B2 1B3 1F4 1F5 1B4 1B5

The caller takes a whole wave before he gives a gradient, so a rank runs all forwards of a wave in a row, and then all
backwards of an earlier one, each in the order of the schedule for that number of microbatches.  A rank is ahead by as
many waves as its first stage is stages ahead of the last one; ranks with several stages are ahead alike.  So it is
1F1B with waves in the place of microbatches.  Nothing runs ahead of what is announced: so the caller bounds his memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from attrs import define, field, frozen

from pipeline_engine.plan.actions import COMPUTE, Action, Compute, Forward, Program
from pipeline_engine.plan.advance import Replica
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.schedules import build

ScheduleFor = Callable[[int], Schedule]
"""The schedule for a number of microbatches, computing verbs only."""


class WavesReplica(Replica):
    """The programs of a call that grows; see ``Replica``.

    Args:
        schedule_for: the schedule of one wave.
        forward_only, rank: as ``Replica`` takes them.
    """

    def __init__(self, schedule_for: ScheduleFor, *, forward_only: bool = False, rank: int | None = None) -> None:
        super().__init__(schedule_for(0), forward_only=forward_only, rank=rank)
        self._schedule_for = schedule_for
        self._writers = _writers(self.graph)

    def announce(self, count: int) -> None:
        """One more wave, of ``count`` microbatches, may run from now on."""
        schedule, first = self._schedule_for(count), self.num_microbatches
        self._grow(count)
        for left, writer, program in zip(self._left, self._writers, schedule.programs, strict=True):
            left.extend(writer.announce(program, range(first, first + count)))

    def _give(self, microbatches: Collection[int]) -> None:
        last = max(microbatches, default=-1)
        for left, writer in zip(self._left, self._writers, strict=True):
            left.extend(writer.backwards_up_to(last))
        super()._give(microbatches)
        self._passing.update(m for m in self.open if m < last)  # of a wave some may have no gradient


def in_waves(name: str, graph: StageGraph, sizes: Sequence[int], *, at_once: int | None = None) -> Schedule:
    """What waves of these sizes come to if each is announced as early as that is of use.

    Args:
        name: of ``SCHEDULES``.
        graph: the stage graph.
        sizes: numbers of microbatches.
        at_once: the most waves that may be announced and not given yet, 1 or more; None for any number.

    Raises:
        ScheduleError: as ``build``.
    """
    programs: list[list[Compute]] = [[] for _ in range(graph.num_ranks)]
    writers, first = _writers(graph, at_once), 0
    for size in sizes:
        parts = build(name, graph, size).programs
        for program, writer, part in zip(programs, writers, parts, strict=True):
            program += writer.announce(part, range(first, first + size))
        first += size
    for program, writer in zip(programs, writers, strict=True):
        program += writer.backwards_up_to(first)
    return Schedule(name, graph, first, programs)


@frozen
class _Wave:
    microbatches: range
    backwards: list[Compute]


@define(eq=False)
class _Writer:
    """Writes one rank's program wave by wave.

    Args:
        ahead: by how many waves the rank is ahead of the last stage.
    """

    ahead: int
    _waves: deque[_Wave] = field(init=False, factory=deque)  # whose backwards are not written yet

    def announce(self, program: Program, microbatches: range) -> list[Compute]:
        """The forwards of one more wave, and the backwards for which it is then time."""
        actions = list(_of_wave(program, microbatches))
        written: list[Compute] = [action for action in actions if isinstance(action, Forward)]
        self._waves.append(_Wave(microbatches, [each for each in actions if not isinstance(each, Forward)]))
        if len(self._waves) > self.ahead:
            written += self._waves.popleft().backwards
        return written

    def backwards_up_to(self, microbatch: int) -> list[Compute]:
        """The backwards of all waves that begin at this microbatch or before."""
        written: list[Compute] = []
        while self._waves and self._waves[0].microbatches.start <= microbatch:
            written += self._waves.popleft().backwards
        return written


def _writers(graph: StageGraph, at_once: int | None = None) -> list[_Writer]:
    hops = graph.hops_to_end()
    first = [0 if graph.num_stages > graph.num_ranks else graph.stages_of(rank)[0] for rank in range(graph.num_ranks)]
    most = max(hops) if at_once is None else at_once - 1
    return [_Writer(min(hops[stage], most)) for stage in first]


def _of_wave(program: Iterable[Action], microbatches: range) -> Iterator[Compute]:
    for action in program:
        if isinstance(action, COMPUTE):
            yield type(action)(action.stage, microbatches[action.microbatch])
