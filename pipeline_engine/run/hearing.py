"""Hearing: a wait until every rank has said what it has to say, or until one of them cannot any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from attrs import frozen

from pipeline_engine.errors import DeadlineError
from pipeline_engine.run.transports.base import Failure
from pipeline_engine.run.watchdog import Watchdog

SECONDS_TO_HEAR_WHY = 0.5
"""What is behind the end of a connection, or was said before it, may come over another one."""

_SECONDS_TO_BE_EARLY = 0.5


def _never() -> bool:
    return False


@frozen(eq=False)
class Hearing:
    """What is waited for.

    Args:
        watchdog: hears.
        is_complete: whether all is here.
        absent: ranks that are not known to have spoken.
        failure: one that ends the wait early.
        gatherers: ranks without whom nothing gets complete, whether they have spoken or not.
        when_long: called once, before much of the deadline has passed.
        others_wait: whether others have waited for long; then ``when_long`` is called at once.
    """

    watchdog: Watchdog
    is_complete: Callable[[], bool]
    absent: Callable[[], list[int]]
    failure: Callable[[], Failure | None]
    gatherers: Sequence[int] = ()
    when_long: Callable[[], object] = _never
    others_wait: Callable[[], bool] = _never

    def wait(self, late: str, deadline: float) -> None:
        """Block until all is complete.

        Args:
            late: what to say if it is not in time.
            deadline: seconds.

        Raises:
            PeerFailedError: there is a failure, or a rank that is waited for has ended.
            DeadlineError: the deadline has passed; the message names those who are waited for.
        """
        until, patience = monotonic() + deadline, min(_SECONDS_TO_BE_EARLY, deadline / 2)
        self.watchdog.wait_until(lambda: self._is_over() or self.others_wait(), patience)
        if not self._is_over():
            self.when_long()
            self.watchdog.wait_until(self._is_over, until - monotonic())
        if self._is_over() and self.failure() is None:  # one that has left may have spoken before, and others know it
            self.watchdog.wait_until(lambda: self.is_complete() or self.failure() is not None, SECONDS_TO_HEAR_WHY)
        if self.is_complete():
            return
        if (known := self._lost()) is not None:
            raise known.as_error()
        ranks = ", rank ".join(map(str, self.absent() or self.gatherers))
        raise DeadlineError(f"{late} within {deadline} seconds; waiting for rank {ranks}.")

    def _is_over(self) -> bool:
        return self.is_complete() or self._lost() is not None

    def _lost(self) -> Failure | None:
        """A failure, or the end of a rank without whom there is nothing to wait for."""
        waited_for = [*self.absent(), *self.gatherers]
        return self.failure() or next(filter(None, map(self.watchdog.gone, waited_for)), None)
