"""A call: one use of a pipeline, from the agreement of all ranks to the last gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from attrs import define, field

from pipeline_engine.errors import UsageError
from pipeline_engine.plan.history import History
from pipeline_engine.run.cargo import Cargo, Grads
from pipeline_engine.run.executor import Executor
from pipeline_engine.run.gate import Gate, Gatekeeper
from pipeline_engine.run.modes import Modes


@define(eq=False)
class Call:
    """What this rank knows of one call.

    Args:
        number: calls of a pipeline are numbered from 0, the same on all ranks.
        entry: the method that the caller used.
        history: what the caller has done, and what it means for this rank.
        executor: performs this rank's part.
        modes: what the caller's thread was set to when it last asked.
        order: for each place in the schedule the caller's number of the microbatch that stands there; what is called
            a microbatch in here is a place.
        gatekeeper: where the caller's gradients come in.
        fail: takes note of an error for the whole pipeline; what is to be raised of it.

    Attributes:
        is_running: whether the caller is in a loop over this call's items.
        given: microbatches whose gradient was given.
        gates: by microbatch, the gate of its output, which lives as long as the caller holds what leads to it.
    """

    number: int
    entry: str
    history: History
    executor: Executor
    modes: Modes
    order: Sequence[int]
    gatekeeper: Gatekeeper
    fail: Callable[[BaseException], BaseException]
    is_running: bool = field(init=False, default=False)
    given: set[int] = field(init=False, factory=set)
    gates: dict[int, weakref.ref[Gate]] = field(init=False, factory=dict)
    _handed: Any = field(init=False, default=None)
    _why_left: str = field(init=False, default="")
    _why_ended: str = field(init=False, default="")
    _why_dropped: dict[int, str] = field(init=False, factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether nothing can come of this call any more."""
        return bool(self._why_ended)

    @property
    def summary(self) -> str:
        """What the caller has done in this call, to be compared with the other ranks'."""
        return f"{self.entry}: {self.history.summary}"

    def ask(self, microbatch: int) -> Any:
        """The output of ``microbatch`` as the caller is handed it."""
        self._check_may_go_on()
        self.executor.doing.item = self.order[microbatch]
        self.modes = self.modes.renewed()
        self.executor.doing.wanted = (self.number, microbatch)
        self._perform(self.modes.run_recording, "ask", microbatch)
        self.executor.doing.wanted = None
        self.executor.count(microbatch)
        handed, self._handed = self._handed, None
        return handed

    def hand(self, microbatch: int, cargo: Cargo) -> None:
        """The executor has reached a yield."""
        differentiates = self.modes.differentiates
        self._handed = self.gatekeeper.gated(cargo, self, microbatch) if differentiates else cargo.tree()

    def give(self, grads: dict[int, Grads], *, retain: bool) -> None:
        """The caller's backward call has ended: run the backwards that it allows.

        Args:
            grads: by microbatch, the gradients of its output.
            retain: whether the caller retains graphs, for another backward through the same outputs.
        """
        again = tuple(sorted(self.given & grads.keys()))
        first = tuple(sorted(grads.keys() - self.given))
        if again:
            self._play("hurry", again)  # each backward has the gradients of its own call
        if retain:
            self._play("retain")
            self.executor.retained.update(grads)
        else:
            self.executor.retained.difference_update(grads)
        for microbatch in sorted(grads):
            self.executor.give(microbatch, grads[microbatch])
        self.given.update(first)
        if first:
            self._play("give", first)
        if again:
            self._play("give_again", again)

    def resume(self) -> None:
        """The caller is in a loop over this call's items."""
        self._check_may_go_on()
        self.is_running = True

    def announce(self, count: int) -> None:
        """So many more microbatches are there, in a call that grows."""
        self._check_may_go_on()
        self.order = range(len(self.order) + count)
        self._play("announce", count)

    def invalidate(self) -> None:
        """Drop what has run ahead of the caller; it is run again when he asks for it."""
        self._play("invalidate")
        self.executor.forget_ahead()

    def finish(self) -> None:
        """The caller has taken every item."""
        self._play("finish")

    def run_closed(self) -> None:
        """The engine owns the loss: everything at once."""
        self._play("run_closed")
        self.abandon("it was complete")

    def skip(self, microbatch: int) -> None:
        """The caller wants no gradient for ``microbatch``: free what is kept of it."""
        self._check_not_over(microbatch)
        if microbatch in self._why_dropped or not self.modes.differentiates:
            return
        if microbatch in self.given:
            raise UsageError(f"microbatch {self.order[microbatch]} cannot be skipped any more: its gradient was given.")
        self._expect_no_more_of([microbatch])
        self._drop([microbatch], "was skipped")

    def check_may_give(self, microbatch: int) -> None:
        """Raise UsageError if a gradient of ``microbatch`` comes too late."""
        self._check_not_over(microbatch)
        if why := self._why_dropped.get(microbatch):
            raise UsageError(f"backward through microbatch {self.order[microbatch]}, which {why}.")
        if microbatch in self.given and microbatch not in self.executor.retained:
            raise UsageError(
                f"backward through microbatch {self.order[microbatch]} for the second time; its graph was freed by the "
                "first. Call the first with retain_graph=True, or add the losses up and call backward once."
            )

    def end(self, why: str, keep: Collection[int] = ()) -> None:
        """Finish what was given, drop the rest, and wait for all that is on its way.

        Args:
            why: what the caller did, for an error that a late backward raises.
            keep: microbatches whose gradient may still come.  While there are such, the call is not over.
        """
        if self.is_over:
            return
        self.is_running = False  # though some of its outputs may stay open
        self._expect_no_more_of(set(range(len(self.order))).difference(self.given, keep))
        if not self._why_left:
            self._why_left = why
            self._play("close")
            self.executor.forget_ahead()
        self._drop(self.open.difference(keep), f"was dropped when {why}")
        self._free(self.executor.retained.difference(keep))
        if not self.open and not self.executor.retained:
            self._play("drain")
            self.abandon(why)

    def abandon(self, why: str) -> None:
        """Free everything, without a word to other ranks."""
        self._why_ended = self._why_ended or why
        self.executor.clear()

    @property
    def may_go_on(self) -> bool:
        """Whether the caller of a later call may still come back to this one: a loop around it, or a late gradient."""
        return self.is_running or (self.entry == "forward" and bool(self.open or self.executor.retained))

    @property
    def held(self) -> set[int]:
        """Microbatches whose gate this rank's caller still holds, or what leads to it."""
        return {microbatch for microbatch, gate in self.gates.items() if gate() is not None}

    @property
    def open(self) -> set[int]:
        """Microbatches that were handed out and whose gradient may still be given."""
        if not self.modes.differentiates:
            return set()
        return self.executor.yielded - self.given - self._why_dropped.keys()

    def _drop(self, microbatches: Collection[int], why: str) -> None:
        if microbatches:
            self._play("drop", tuple(sorted(microbatches)))
        self._why_dropped |= dict.fromkeys(microbatches, why)
        self._free(microbatches)

    def _free(self, microbatches: Collection[int]) -> None:
        self.executor.discard(microbatches)
        self.executor.retained.difference_update(microbatches)

    def _expect_no_more_of(self, microbatches: Iterable[int]) -> None:
        """Known before the event is played, which may perform the last backward of what remains."""
        if self.executor.last_backward is not None:
            self.executor.last_backward.drop(microbatches)

    def _play(self, event: str, *arguments: Any) -> None:
        """Play an event on all programs, and perform what it adds to this rank's under the modes of the last ask."""
        self._perform(self.modes.run, event, *arguments)

    def _perform(self, run: Callable[..., None], event: str, *arguments: Any) -> None:
        try:
            run(self.executor.perform, self.history.play(event, *arguments))
        except BaseException as error:
            raise self.fail(error)  # noqa: B904  its cause is set

    def _check_may_go_on(self) -> None:
        if why := self._why_ended or self._why_left:
            raise UsageError(f"this {self.entry} cannot go on: it ended when {why}.")

    def _check_not_over(self, microbatch: int) -> None:
        if self._why_ended:
            raise UsageError(
                f"backward through microbatch {self.order[microbatch]}, which was dropped when {self._why_ended}."
            )
