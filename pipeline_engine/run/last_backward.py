"""The last backward of a stage in a call: announced just before it runs, for whoever reduces gradients then.

A data parallel wrapper reduces each gradient when its last contribution arrives; it must be told which one that is.
Where backwards are split no moment has that meaning: some gradients come in the first half and some in the second,
and the first half of the last microbatch may run before the second half of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from attrs import define, field

from pipeline_engine.errors import UsageError
from pipeline_engine.plan.actions import Action, Backward, BackwardInput
from pipeline_engine.plan.schedule import Schedule

OnLastBackward = Callable[[int], object]
"""Called with the number of a stage."""


@define(eq=False)
class LastBackward:
    """Knows of one call and each stage for which microbatches gradients are still to come.

    Args:
        count: number of microbatches of the call.
        announce: the caller's function.
    """

    _count: int
    _announce: OnLastBackward
    _dropped: set[int] = field(init=False, factory=set)
    _begun: dict[int, set[int]] = field(init=False, factory=dict)

    def around(self, perform: Callable[[Action], None]) -> Callable[[Action], None]:
        """``perform``, with an announcement before the last backward of each stage."""

        def announcing(action: Action) -> None:
            if isinstance(action, Backward):
                self._begin(action.stage, action.microbatch)
            perform(action)

        return announcing

    def drop(self, microbatches: Iterable[int]) -> None:
        """No gradient will be given for these."""
        self._dropped.update(microbatches)

    def _begin(self, stage: int, microbatch: int) -> None:
        begun = self._begun.setdefault(stage, set())
        begun.add(microbatch)
        if len(begun | self._dropped) == self._count:
            self._announce(stage)


def check_whole(schedule: Schedule) -> None:
    """Raise UsageError if ``schedule`` splits backwards."""
    if any(isinstance(action, BackwardInput) for program in schedule.programs for action in program):
        raise UsageError(
            f"on_last_backward: schedule {schedule.name!r} splits backwards, so that no single one is the last to add "
            "to the gradients; use a schedule that does not, or reduce gradients after flush()."
        )
