"""The replica: every rank plays the caller's history on a copy of all programs.

A rank that looked at its own program only could strand itself: its next action may need a message that a peer sends
only after the caller has given a gradient.  So every rank keeps all programs and plays every event of the caller on
them: the result is a pure function of the history, the same on all ranks.

    advance    take, on every rank, the first action that is left, over and over, until nothing moves: the fixpoint
               is unique.  A rank stops at a backward whose gradient is not given or whose needs are not made.
    ask(k)     the caller wants item k: advance; while its output is not made, pass over the backwards of the smallest
               microbatch that blocks, and advance again
    give(ks)   a backward call of the caller has ended: advance over backwards only, since no forward may run inside
               it; what was passed over comes first
    give_again(ks)  the graphs were retained and a second backward call has ended: the same backwards once more
    invalidate the caller changed what forwards depend on: those that ran ahead are run again when they are asked for
    skip(k)    the caller wants no gradient for k
    finish     the items are exhausted: pass over whatever blocks until nothing does
    close(n)   the caller left after n items: what was not yielded is dropped, what was given is finished
    drop_open  whatever was not given by now never will be
    run_closed nobody owns the loss but the engine: the whole of all programs at once

Each event returns a ``Batch``: for every rank the actions that it adds, transfers included.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.actions import BACKWARD, Action, Compute, Forward, makes, needs
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.transfers import Batch, Transfers
from pipeline_engine.plan.values import Activation, OutputGrad, Value


class Replica:
    """All programs of one call, and how far the caller's history has brought them.

    Args:
        schedule: computing verbs only.
        forward_only: nothing is differentiated: the same programs without their backwards, which still bound how far
            the forwards run ahead of the caller.
        hand_out: whether outputs travel to every rank; otherwise only the last stage's rank has them.
    """

    def __init__(self, schedule: Schedule, *, forward_only: bool = False, hand_out: bool = True) -> None:
        self.schedule = schedule
        self.graph = schedule.graph
        self.forward_only = forward_only
        self._programs = [[a for a in program if isinstance(a, (Forward, *BACKWARD))] for program in schedule.programs]
        self._next = [0 for _ in self._programs]
        self._passed: list[dict[Compute, None]] = [{} for _ in self._programs]
        self._again: list[list[Compute]] = [[] for _ in self._programs]
        self._made: set[Value] = set()
        self._transfers = Transfers(self.graph, hand_out=hand_out)
        self.yielded: set[int] = set()
        self.given: set[int] = set()
        self.dropped: set[int] = set()
        self._deferred: set[int] = set()
        self._blocking: set[int] = set()
        self._closed_loop = False

    @property
    def open(self) -> frozenset[int]:
        """Microbatches that were yielded and whose gradient may still be given."""
        return frozenset(self.yielded - self.given - self.dropped)

    @property
    def is_done(self) -> bool:
        """Whether every program has been performed or dropped to its end."""
        return not any(self._left(rank) for rank in range(len(self._programs)))

    def ask(self, microbatch: int) -> Batch:
        """The caller wants the output of ``microbatch``."""
        if self.forward_only:
            self.given |= self.yielded
        self._advance(forwards=True)
        while Activation(self.graph.last_stage, microbatch) not in self._made:
            self._defer(f"the output of microbatch {microbatch}")
        self._transfers.hand_out(microbatch)
        self.yielded.add(microbatch)
        return self._transfers.end_batch()

    def give(self, microbatches: Collection[int]) -> Batch:
        """The caller's backward call has reached the gates of ``microbatches``."""
        self.given |= set(microbatches)
        self._made |= {OutputGrad(m) for m in microbatches}
        self._advance(forwards=False)
        return self._transfers.end_batch()

    def give_again(self, microbatches: Collection[int]) -> Batch:
        """A second backward call has reached the gates of microbatches whose graphs were retained.

        Raises:
            ScheduleError: the first one's backwards have not all been performed yet.
        """
        wanted = set(microbatches)
        if any(action.microbatch in wanted for rank in range(len(self._programs)) for action in self._left(rank)):
            raise ScheduleError(f"the backwards of microbatches {sorted(wanted)} have not all been performed yet.")
        self._repeat(lambda action: isinstance(action, BACKWARD) and action.microbatch in wanted)
        self._advance(forwards=False)
        return self._transfers.end_batch()

    def invalidate(self) -> Batch:
        """What ran ahead of the caller is stale: forget it, and run it again when he asks for it."""
        done = [set(program) - set(self._left(rank)) for rank, program in enumerate(self._programs)]
        settled = self.yielded | self.dropped
        ahead = {a for actions in done for a in actions if isinstance(a, Forward) and a.microbatch not in settled}
        self._repeat(lambda action: action in ahead)
        return self._transfers.end_batch()

    def skip(self, microbatch: int) -> None:
        """The caller wants no gradient for ``microbatch``."""
        self._drop({microbatch})

    def finish(self) -> Batch:
        """The caller has asked for every item."""
        if self.forward_only:
            self.given |= self.yielded
        self._advance(forwards=True)
        while self._blocking:
            self._defer("the end of the programs")
        return self._transfers.end_batch()

    def close(self) -> Batch:
        """The caller left early: drop what was not yielded, finish what was given."""
        self.dropped |= set(range(self.schedule.num_microbatches)) - self.yielded
        return self.finish()

    def drop_open(self) -> frozenset[int]:
        """Drop what was yielded and never given; returns which."""
        dropped = self.open
        self._drop(dropped)
        return dropped

    def run_closed(self) -> Batch:
        """The engine owns the loss: every gradient is given on the last stage as soon as the output is there.

        Raises:
            ScheduleError: the programs cannot reach their end.
        """
        self.given = set(range(self.schedule.num_microbatches))
        self._closed_loop = True
        self._advance(forwards=True)
        if not self.is_done:
            raise ScheduleError(f"schedule {self.schedule.name!r} cannot reach its end:\n{self._stuck()}")
        return self.drain()

    def drain(self) -> Batch:
        """Nothing will be computed any more: wait for all that is on its way."""
        self._transfers.drain()
        return self._transfers.end_batch()

    def _drop(self, microbatches: Collection[int]) -> None:
        self.dropped |= set(microbatches)
        for passed in self._passed:
            for action in [action for action in passed if action.microbatch in microbatches]:
                del passed[action]

    def _left(self, rank: int) -> list[Compute]:
        """What the rank has not performed yet, apart from what was dropped."""
        actions = (*self._again[rank], *self._passed[rank], *self._programs[rank][self._next[rank] :])
        return [action for action in actions if action.microbatch not in self.dropped]

    def _repeat(self, is_repeated: Callable[[Compute], bool]) -> None:
        """Have actions that were performed performed once more, before all others."""
        repeated = [[action for action in program if is_repeated(action)] for program in self._programs]
        remade = {value for actions in repeated for action in actions for value in makes(action)}
        self._made -= remade
        self._transfers.forget(remade)
        for again, actions in zip(self._again, repeated, strict=True):
            again[:] = dict.fromkeys((*again, *actions))

    def _defer(self, wanted: str) -> None:
        if not self._blocking:
            raise ScheduleError(f"schedule {self.schedule.name!r} cannot reach {wanted}:\n{self._stuck()}")
        self._deferred.add(min(self._blocking))
        self._advance(forwards=True)

    def _advance(self, *, forwards: bool) -> None:
        moved = True
        while moved:
            moved, self._blocking = False, set()
            for rank in range(len(self._programs)):
                while (action := self._head(rank)) is not None and self._may(action, forwards):
                    self._take(rank, action)
                    moved = True

    def _head(self, rank: int) -> Compute | None:
        """The first action of ``rank`` that is left, those passed over first once their gradient is given."""
        for action in self._again[rank]:
            if action.microbatch not in self.dropped:
                return action
        for action in self._passed[rank]:
            if action.microbatch in self.given:
                return action
        program = self._programs[rank]
        while self._next[rank] < len(program):
            action = program[self._next[rank]]
            if action.microbatch in self.dropped:
                self._next[rank] += 1
            elif self._is_passed_over(action):
                self._passed[rank][action] = None
                self._next[rank] += 1
            else:
                return action
        return None

    def _is_passed_over(self, action: Compute) -> bool:
        m = action.microbatch
        return isinstance(action, BACKWARD) and m in self._deferred and m not in self.given

    def _may(self, action: Compute, forwards: bool) -> bool:
        if isinstance(action, BACKWARD):
            if action.microbatch not in self.given:
                self._blocking.add(action.microbatch)
                return False
            if self.forward_only:
                return True
        elif not forwards:
            return False
        return all(value in self._made for value in needs(action, self.graph))

    def _take(self, rank: int, action: Compute) -> None:
        if action in self._again[rank]:
            self._again[rank].remove(action)
        elif action in self._passed[rank]:
            del self._passed[rank][action]
        else:
            self._next[rank] += 1
        if self.forward_only and isinstance(action, BACKWARD):
            return
        self._made.update(makes(action))
        self._transfers.compute(rank, action)
        if self._closed_loop and action == Forward(self.graph.last_stage, action.microbatch):
            self._transfers.hand_out(action.microbatch)
            self._made.add(OutputGrad(action.microbatch))

    def _stuck(self) -> str:
        return "\n".join(
            f"  rank {rank}   {head}   waits for {', '.join(self._missing(head)) or 'its turn'}"
            for rank in range(len(self._programs))
            if (head := self._head(rank)) is not None
        )

    def _missing(self, action: Action) -> list[str]:
        return [str(value) for value in needs(action, self.graph) if value not in self._made]


def canonical_batches(schedule: Schedule, *, hand_out: bool = True, forward_only: bool = False) -> list[Batch]:
    """The batches of a caller who takes every item and, unless ``forward_only``, gives its gradient at once."""
    replica = Replica(schedule, forward_only=forward_only, hand_out=hand_out)
    if not hand_out:
        return [replica.run_closed()]
    batches = []
    for m in range(schedule.num_microbatches):
        batches.append(replica.ask(m))
        if not forward_only:
            batches.append(replica.give([m]))
    return [*batches, replica.finish(), replica.drain()]


def lower(schedule: Schedule, *, hand_out: bool = True, forward_only: bool = False) -> Schedule:
    """The schedule with transfers and yields, as it runs when the caller gives each gradient at once.

    Args:
        schedule: computing verbs only; a lowered one is returned as it is.
        hand_out: whether outputs travel to every rank (``stream``, ``forward``) or stay on the last (``step``).
        forward_only: without backwards.

    Raises:
        ScheduleError: the programs cannot reach some output or their end.
    """
    if schedule.is_lowered:
        return schedule
    batches = canonical_batches(schedule, hand_out=hand_out, forward_only=forward_only)
    programs = [[action for batch in batches for action in batch[rank]] for rank in range(schedule.graph.num_ranks)]
    return Schedule(schedule.name, schedule.graph, schedule.num_microbatches, programs)
