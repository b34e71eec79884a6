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
    retain     the backward call that gives next retains its graphs
    hurry(ks)  a second backward call begins for what was given: the first one's backwards are finished
    give_again(ks)  the graphs were retained and a second backward call has ended: the same backwards once more
    invalidate the caller is about to change what forwards depend on: what was given is finished, and forwards that ran
               ahead are run again when they are asked for
    drop(ks)   the caller gives no gradient for ks any more
    finish     the items are exhausted: pass over whatever blocks until nothing does
    close(n)   the caller left after n items: what was not yielded is dropped, what was given is finished
    run_closed nobody owns the loss but the engine: the whole of all programs at once

Each event returns a ``Batch``: for every rank the actions that it adds, transfers included.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.actions import BACKWARD, COMPUTE, Action, Compute, Forward, makes
from pipeline_engine.plan.collector import without_collector
from pipeline_engine.plan.numbering import Rule, numbering_of
from pipeline_engine.plan.remaining import Remaining
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.transfers import Batch, Transfers
from pipeline_engine.plan.values import Activation, OutputGrad


class Replica:
    """All programs of one call, and how far the caller's history has brought them.

    Args:
        schedule: computing verbs only.
        forward_only: nothing is differentiated: the same programs without their backwards, which still bound how far
            the forwards run ahead of the caller.
        hand_out: whether outputs travel to every rank; otherwise only the last stage's rank has them.
        rank: the rank whose part of each batch is wanted, which is much faster; None for all.

    Attributes:
        yielded: microbatches that the caller was handed.
        given: microbatches whose gradient he has given.
        dropped: microbatches of which nothing more is computed.
        num_microbatches: how many there are.
    """

    def __init__(
        self, schedule: Schedule, *, forward_only: bool = False, hand_out: bool = True, rank: int | None = None
    ) -> None:
        self.schedule = schedule
        self.graph = schedule.graph
        self.forward_only = forward_only
        self.yielded: set[int] = set()
        self.given: set[int] = set()
        self.dropped: set[int] = set()
        self.num_microbatches = 0
        self._passing: set[int] = set()  # deferred and not given: backwards are passed over
        self._numbering = numbering_of(schedule.graph)
        self._made = bytearray()  # by number: whether it is made
        self._grow(schedule.num_microbatches)
        self._left = [Remaining(program) for program in _computing(schedule)]
        self._transfers = Transfers(self.graph, hand_out=hand_out, rank=rank)
        self._closed_loop = False

    @property
    def open(self) -> frozenset[int]:
        """Microbatches that were yielded and whose gradient may still be given."""
        return frozenset(self.yielded - self.given - self.dropped)

    @property
    def is_done(self) -> bool:
        """Whether every program has been performed or dropped to its end."""
        for left in self._left:
            left.head(self._passing, self.dropped)
        return all(left.is_done for left in self._left)

    def ask(self, microbatch: int) -> Batch:
        """The caller wants the output of ``microbatch``."""
        self._begin()
        output = self._numbering.number(Activation(self.graph.last_stage, microbatch))
        while not self._made[output]:
            self._defer(f"the output of microbatch {microbatch}")
        self._transfers.hand_out(microbatch)
        self.yielded.add(microbatch)
        return self._transfers.end_batch()

    def give(self, microbatches: Collection[int]) -> Batch:
        """The caller's backward call has reached the gates of ``microbatches``."""
        self._give(microbatches)
        for microbatch in microbatches:
            self._made[self._numbering.number(OutputGrad(microbatch))] = True
        self._advance(forwards=False)
        return self._transfers.end_batch()

    def hurry(self, microbatches: Collection[int]) -> Batch:
        """Perform the backwards of ``microbatches``, which were given, though other actions stand before them."""
        self._hurry(microbatches)
        return self._transfers.end_batch()

    def retain(self) -> None:
        """The backward call that gives next retains its graphs: nothing changes here, but ranks must agree on it."""

    def give_again(self, microbatches: Collection[int]) -> Batch:
        """A second backward call has reached the gates of microbatches whose graphs were retained.

        Raises:
            ScheduleError: the first one's backwards have not all been performed yet.
        """
        wanted = set(microbatches) - self.dropped
        if any(action.microbatch in wanted for left in self._left for action in left.all()):
            raise ScheduleError(f"the backwards of microbatches {sorted(wanted)} have not all been performed yet.")
        self._repeat([[a for a in left.program if _is_backward_of(a, wanted)] for left in self._left])
        self._advance(forwards=False)
        return self._transfers.end_batch()

    def invalidate(self) -> Batch:
        """What forwards depend on is about to change.

        First the backwards of what was given are performed, though forwards stand before them.  What ran ahead of
        the caller is forgotten, and run again when he asks for it.
        """
        settled = self.yielded | self.dropped
        if not self.forward_only:
            self._hurry(self.given)
        self._repeat([_forwards_ahead(left, settled) for left in self._left])
        return self._transfers.end_batch()

    def drop(self, microbatches: Collection[int]) -> None:
        """The caller gives no gradient for ``microbatches`` any more."""
        self.dropped.update(microbatches)
        self._passing.difference_update(microbatches)
        for left in self._left:
            left.drop(microbatches)

    def finish(self) -> Batch:
        """The caller has asked for every item."""
        self._begin()
        while self._blocking():
            self._defer("the end of the programs")
        return self._transfers.end_batch()

    def close(self) -> Batch:
        """The caller left early: drop what was not yielded, finish what was given."""
        self.drop(set(range(self.num_microbatches)) - self.yielded)
        return self.finish()

    def run_closed(self) -> Batch:
        """The engine owns the loss: every gradient is given on the last stage as soon as the output is there.

        Raises:
            ScheduleError: the programs cannot reach their end.
        """
        self._give(range(self.num_microbatches))
        self._closed_loop = True
        self._advance(forwards=True)
        if not self.is_done:
            raise ScheduleError(f"schedule {self.schedule.name!r} cannot reach its end:\n{self._stuck()}")
        return self.drain()

    def drain(self) -> Batch:
        """Nothing will be computed any more: wait for all that is on its way."""
        self._transfers.drain()
        return self._transfers.end_batch()

    def _grow(self, count: int) -> None:
        self.num_microbatches += count
        self._made.extend(bytes(count * self._numbering.width))

    def _begin(self) -> None:
        """Forwards may run again."""
        if self.forward_only:
            self._give(self.yielded - self.given)
        self._advance(forwards=True)

    def _give(self, microbatches: Collection[int]) -> None:
        self.given.update(microbatches)
        self._passing.difference_update(microbatches)
        for left in self._left:
            left.give(microbatches)

    def _hurry(self, microbatches: Collection[int]) -> None:
        for left in self._left:
            left.hurry(set(microbatches) - self.dropped)
        self._advance(forwards=False)

    def _repeat(self, repeated: Sequence[Collection[Compute]]) -> None:
        """Have actions that were performed performed once more, before all others; by rank."""
        numbers = {self._numbering.number(value) for actions in repeated for a in actions for value in makes(a)}
        for number in numbers:
            self._made[number] = False
        self._transfers.forget(numbers)
        for left, actions in zip(self._left, repeated, strict=True):
            left.repeat(actions)

    def _blocking(self) -> set[int]:
        """Microbatches at whose backward a rank stands, since their gradient is not given."""
        heads = (left.head(self._passing, self.dropped) for left in self._left)
        return {
            head.microbatch
            for head in heads
            if head is not None and head.microbatch not in self.given and self._numbering.rule(head).is_backward
        }

    def _defer(self, wanted: str) -> None:
        blocking = self._blocking()
        if not blocking:
            raise ScheduleError(f"schedule {self.schedule.name!r} cannot reach {wanted}:\n{self._stuck()}")
        self._passing.add(min(blocking))
        self._advance(forwards=True)

    def _advance(self, *, forwards: bool) -> None:
        """To the fixpoint: a rank is looked at again when something has come for it."""
        rules = self._numbering.rules
        awake = dict.fromkeys(range(len(self._left)))
        while awake:
            rank, _ = awake.popitem()
            left = self._left[rank]
            while (action := left.head(self._passing, self.dropped)) is not None:
                rule = rules[type(action)][action.stage]
                if not self._may(action, rule, forwards):
                    break
                left.take()
                self._perform(rank, action, rule)
                for woken in rule.wakes:
                    awake[woken] = None

    def _may(self, action: Compute, rule: Rule, forwards: bool) -> bool:
        if rule.is_backward:
            if action.microbatch not in self.given:
                return False
            if self.forward_only:
                return True
        elif not forwards:
            return False
        base = action.microbatch * self._numbering.width
        for offset in rule.needs:  # noqa: SIM110  a generator would double the time of this function
            if not self._made[base + offset]:
                return False
        return True

    def _perform(self, rank: int, action: Compute, rule: Rule) -> None:
        if self.forward_only and rule.is_backward:
            return
        self._made[action.microbatch * self._numbering.width + rule.makes] = True
        self._transfers.compute(rank, action)
        if self._closed_loop and rule.is_last_forward:
            self._transfers.hand_out(action.microbatch)
            self._made[self._numbering.number(OutputGrad(action.microbatch))] = True

    def _stuck(self) -> str:
        heads = [left.head(self._passing, self.dropped) for left in self._left]
        return "\n".join(
            f"  rank {rank}   {head}   waits for {', '.join(self._missing(head)) or 'its turn'}"
            for rank, head in enumerate(heads)
            if head is not None
        )

    def _missing(self, action: Compute) -> list[str]:
        numbers = [action.microbatch * self._numbering.width + offset for offset in self._numbering.rule(action).needs]
        return [str(self._numbering.name(action, number)) for number in numbers if not self._made[number]]


def _is_backward_of(action: Compute, microbatches: Collection[int]) -> bool:
    return isinstance(action, BACKWARD) and action.microbatch in microbatches


def _forwards_ahead(left: Remaining, settled: Collection[int]) -> list[Compute]:
    """The forwards of a rank that were performed before the caller asked for their output."""
    waiting = set(left.all())
    ahead = (action for action in left.program if isinstance(action, Forward) and action.microbatch not in settled)
    return [action for action in ahead if action not in waiting]


def _computing(schedule: Schedule) -> list[list[Compute]]:
    return [[action for action in program if isinstance(action, COMPUTE)] for program in schedule.programs]


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


@without_collector
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
    programs: list[list[Action]] = [[] for _ in schedule.programs]
    for batch in canonical_batches(schedule, hand_out=hand_out, forward_only=forward_only):
        for program, part in zip(programs, batch, strict=True):
            program += part
    return Schedule(schedule.name, schedule.graph, schedule.num_microbatches, programs)
