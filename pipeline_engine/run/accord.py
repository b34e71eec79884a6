"""The accord: what the ranks of a pipeline agree on before each call, and what becomes of the calls if one fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from attrs import define, field

from pipeline_engine.errors import DeadlineError, PeerFailedError, PipelineError, TransportError, UsageError
from pipeline_engine.run import wire
from pipeline_engine.run.agreement import Held, Word, agree
from pipeline_engine.run.call import Call
from pipeline_engine.run.doing import Doing, report
from pipeline_engine.run.gate import Gatekeeper
from pipeline_engine.run.mailbox import Traffic, failure_of
from pipeline_engine.run.owner import Owner
from pipeline_engine.run.transports.base import Failure, Transport

T = TypeVar("T")

PeerError = Callable[[PeerFailedError], Exception]
"""Makes of a peer's failure what this rank's caller is to see."""


@define(eq=False)
class Accord:
    """One rank's part in it.

    Args:
        transport: joins the ranks.
        deadline: seconds that any single wait may take.
        keep_open: whether outputs outlast the next call.
        peer_error: makes what is raised of a peer's failure; None for that itself.

    Attributes:
        doing: what this rank does, for others to ask.
        gatekeeper: where the caller's gradients come in.
        traffic: what is on its way.
        calls: those that are not over.
        count: how many calls there were.
        agreements: how many there were, over all ranks.
        is_closed: whether the caller has closed the pipeline.
    """

    transport: Transport
    deadline: float
    keep_open: bool
    peer_error: PeerError | None
    doing: Doing = field(init=False, factory=Doing)
    gatekeeper: Gatekeeper = field(init=False, factory=Gatekeeper)
    traffic: Traffic = field(init=False, factory=Traffic)
    calls: list[Call] = field(init=False, factory=list)
    count: int = field(init=False, default=0)
    agreements: int = field(init=False, default=0)
    is_closed: bool = field(init=False, default=False)
    _owner: Owner = field(init=False, factory=Owner)
    _why_failed: str = field(init=False, default="")
    _why_broken: str = field(init=False, default="")

    def check_open(self) -> None:
        """Raise UsageError if the pipeline is closed, or is another thread's or process's."""
        if self.is_closed:
            raise UsageError("the pipeline is closed; build another one.")
        self._owner.check()

    @contextmanager
    def refusing(self, entry: str) -> Iterator[None]:
        """If this rank cannot make a call, all ranks are told where they agree on it, and nothing else changes."""
        self.check_open()
        try:
            yield
        except Exception as error:
            self.agree(entry, {}, failure_of(self.transport.rank, f"the planning of {entry}", error))
            raise

    def agree(self, entry: str, entries: Mapping[str, object], refusal: Failure | None = None) -> Held:
        """Before anything moves: all ranks are in the same call, and have done the same before.

        Returns:
            what may stay open of the calls so far.
        """
        self.check_open()
        self.doing.begin(entry)
        self.gatekeeper.forget()
        with self.meeting(f"agreement on {entry}"):
            self.settle()
            summaries = {f"history of call {call.number}": call.summary for call in self.calls}
            past = {call.number: call.history.marks for call in self.calls}
            counts = (self.count, self.agreements)
            held = {call.number: call.held for call in self.calls} if self.keep_open else {}
            word = Word({"entry point": entry, **entries, **summaries}, past, refusal, counts, held)
            agreed = agree(self.transport, word, deadline=self.deadline)
            self.count, self.agreements = agreed.counts
            self.agreements += 1
        if refusal is None and agreed.refusal is not None:
            raise self._heard(agreed.refusal.as_error())
        return agreed.held

    def everywhere(self, what: T, rank: int, where: str) -> T:
        """What ``rank`` has, on every rank: a tree of tensors."""
        with self.meeting(where):
            own = wire.packed(what) if self.transport.rank == rank else b""
            received: T = wire.unpacked(self.transport.exchange(own, deadline=self.deadline)[rank])
            return received

    def end_calls(self, why: str, held: Held, *, going_on: bool = False) -> None:
        """End the calls of the past except for what is held; ``going_on``: not those to which the caller comes back."""
        for call in self.calls:
            stays = call.is_running if self.keep_open else call.may_go_on
            if not (going_on and stays):
                call.end(why, held.get(call.number, ()))
        self.calls = [call for call in self.calls if not call.is_over]

    @contextmanager
    def meeting(self, where: str) -> Iterator[None]:
        """All ranks are waited for in the body; what is raised there is taken note of."""
        try:
            with self.doing.meets(where):
                yield
        except BaseException as error:
            raise self.fail(error)  # noqa: B904  its cause is set

    def settle(self) -> None:
        """After a failure, once every rank has raised it: empty the channels and begin afresh."""
        if self._why_broken:
            raise TransportError(self._why_broken)
        if not self.transport.has_raised:
            if failure := self.transport.failure():
                raise failure.as_error()
            return
        try:
            self.transport.settle(deadline=self.deadline)
        except PeerFailedError as error:
            self._why_broken = f"the pipeline is broken, because {self._why_failed or error}"
            raise TransportError(self._why_broken) from error
        self.traffic.clear()
        self._why_failed = ""
        self.transport.has_raised = False

    def fail(self, error: BaseException) -> BaseException:
        """After an error no call can go on; every rank is told, unless all have found the same.

        Returns:
            what is to be raised.
        """
        if isinstance(error, DeadlineError):
            report(error, self.transport)
        if not isinstance(error, UsageError) or not self.doing.calls:  # while it is built each finds its own
            self.transport.fail(failure_of(self.transport.rank, self.doing.place, error))
        self.transport.has_raised = True
        self._why_failed = self._why_failed or f"{_named(error)}{error}"
        self.doing.has_failed = True
        for call in self.calls:
            call.abandon(f"the pipeline failed with {type(error).__name__}")
        self.calls.clear()
        return self._heard(error)

    def _heard(self, error: BaseException) -> BaseException:
        """What the caller gets to see of an error."""
        if self.peer_error is None or not isinstance(error, PeerFailedError):
            return error
        made = self.peer_error(error)
        if made is not error:
            made.__cause__ = error
        return made


def _named(error: BaseException) -> str:
    return "" if isinstance(error, PipelineError) else f"{type(error).__name__}: "
