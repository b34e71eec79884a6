"""What a rank is doing: a record that its main thread writes and any other thread may read.

When a wait takes too long every rank says what its record says.  Side by side that is a hang report in the schedule's
own words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import assert_never

from attrs import asdict, define, frozen

from pipeline_engine.errors import DeadlineError
from pipeline_engine.plan.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    PostRecv,
    Publish,
    Send,
    WaitRecv,
    WaitSend,
    Yield,
)
from pipeline_engine.plan.values import Activation, InputGrad, Output, OutputGrad, Value
from pipeline_engine.run.transports.base import Transport

SECONDS_TO_ANSWER = 1.0
_REPORT = "\nrank 0   "


@define(eq=False)
class Doing:
    """One rank's record.

    Attributes:
        calls: how many calls the caller has made; a flush is one.
        entry: the method that he called last.
        item: the microbatch that he was handed last in that call; -1 if none.
        wanted: number of the call and place in it of the item that he waits for, if he waits for one.
        action: what is being performed, if anything is.
        meeting: where all ranks are being waited for, if they are.
        has_failed: whether what it performed or waited for has raised.  The record stays as it was then until the next
            call: other ranks, whose waits take too long at the same moment, may be about to ask for it.
    """

    calls: int = 0
    entry: str = "the building"
    item: int = -1
    wanted: tuple[int, int] | None = None
    action: Action | None = None
    meeting: str = ""
    has_failed: bool = False

    def begin(self, entry: str) -> None:
        """The caller makes a call."""
        self.calls += 1
        self.entry, self.item = entry, -1
        self.action, self.meeting, self.has_failed = None, "", False

    @contextmanager
    def meets(self, where: str) -> Iterator[None]:
        """All ranks are being waited for."""
        self.meeting = where
        yield
        self.meeting = ""  # and it stays if the wait ends with an error, see has_failed

    def state(self) -> bytes:
        """The record as others are told."""
        action = self.action
        waits_for = action.from_rank if isinstance(action, WaitRecv) else None
        waits_for = action.to_rank if isinstance(action, WaitSend) else waits_for
        words = self._in_words() + self.has_failed * ", which has raised"
        state = State(self.calls, self.entry, words, self.meeting or waits_for, self._is_idle(), self.has_failed)
        return json.dumps(asdict(state)).encode()

    def _is_idle(self) -> bool:
        return self.action is None and not self.meeting

    @property
    def place(self) -> str:
        """Where this rank is: in an action, a meeting, or the caller's code."""
        return "the caller's code" if self.has_failed else self._last_place

    @property
    def _last_place(self) -> str:
        """The same, and after an error where that was."""
        if self.meeting:
            return self.meeting
        if (action := self.action) is not None:
            return describe(action)
        return "the caller's code" + (f" since microbatch {self.item}" if self.item >= 0 else "")

    def _in_words(self) -> str:
        return (
            f"waits for all ranks: {self.meeting}"
            if self.meeting
            else f"in {self._last_place}"
            if self._is_idle()
            else self._last_place
        )


@frozen
class State:
    """What one rank says of itself; ``waits_for`` is a rank, a meeting of all, or nothing."""

    calls: int
    entry: str
    words: str
    waits_for: int | str | None
    is_idle: bool
    has_failed: bool = False

    def __str__(self) -> str:
        return f"call {self.calls} ({self.entry})   {self.words}"


def report(error: DeadlineError, transport: Transport) -> None:
    """Add to an error what every rank does and waits for, and the likely cause if it can be told."""
    if _REPORT in str(error):
        return
    said = transport.states(SECONDS_TO_ANSWER)
    states = {rank: State(**json.loads(text)) for rank, text in said.items()}
    if states:
        error.args = (f"{error}\n{table(states, transport.num_ranks)}",)


def table(states: Mapping[int, State], num_ranks: int) -> str:
    """A line for each rank, and the likely cause."""
    lines = [f"rank {rank}   {states.get(rank, 'gives no answer')}" for rank in range(num_ranks)]
    causes = list(_causes(states, num_ranks))
    return "\n".join(lines + [f"likely cause: {'; '.join(causes)}." for _ in causes[:1]])


def _causes(states: Mapping[int, State], num_ranks: int) -> Iterator[str]:
    for rank in range(num_ranks):
        if rank not in states:
            yield f"rank {rank} gives no answer: its process is stopped, or one long call holds its interpreter"
    for rank, state in states.items():
        if state.has_failed:
            continue
        if state.is_idle:
            yield f"rank {rank} is {state.words}"
        elif state.waits_for is None:
            yield f"rank {rank} takes long for {state.words}"
    calls = {rank: state.calls for rank, state in sorted(states.items())}
    if len(set(calls.values())) > 1:
        yield ", ".join(f"rank {rank} performed {count} calls" for rank, count in calls.items())


def describe(action: Action) -> str:
    """An action for a reader of an error: what is written in the program, and in words."""
    return f"{action} ({_words(action)})"


def _words(action: Action) -> str:
    match action:
        case Forward(stage, m) | Backward(stage, m) | BackwardInput(stage, m) | BackwardWeight(stage, m):
            return f"{type(action).__name__.lower()} of stage {stage}, microbatch {m}"
        case Publish(m):
            return f"publish of the outputs of microbatch {m}"
        case Yield(m):
            return f"microbatch {m} in the caller's hands"
        case Send(value, rank):
            return f"send of {_name(value)}, to rank {rank}"
        case WaitSend(value, rank):
            return f"wait for the end of the send of {_name(value)}, to rank {rank}"
        case PostRecv(value, rank):
            return f"post of the receive of {_name(value)}, from rank {rank}"
        case WaitRecv(value, rank):
            return f"receive of {_name(value)}, from rank {rank}"
        case _:
            assert_never(action)


def _name(value: Value) -> str:
    match value:
        case Activation(stage, m):
            return f"the output of stage {stage}, microbatch {m}"
        case InputGrad(stage, m):
            return f"the input gradient of stage {stage}, microbatch {m}"
        case Output(m):
            return f"the outputs of microbatch {m}"
        case OutputGrad(m):
            return f"the output gradient of microbatch {m}"
