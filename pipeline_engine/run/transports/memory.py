"""A transport for threads of one process: every rank holds one end of a shared hub.

It keeps gloo's manners, so that what works here works there: a send completes only when its receive is posted,
and the bytes are read at that moment, not when ``send`` was called.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from threading import Condition
from time import monotonic

import torch
from attrs import Factory, define, field

from pipeline_engine.errors import DeadlineError, TransportError
from pipeline_engine.plan.values import Channel
from pipeline_engine.run.transports.base import SECONDS_TO_EXPLAIN, Failure, Handle, Host, Message, Transport

_SECONDS_BETWEEN_LOOKS = 0.25  # a departure rings no bell: it may come from a finaliser, which must take no lock


@define(eq=False)
class _Message(Handle):
    """A posted send or receive, of at most ``room`` bytes; ``problem`` says why it can never be moved."""

    channel: Channel
    buffer: Message
    room: int
    moved: bool = False
    problem: str = ""

    def over(self) -> bool:
        return self.moved or bool(self.problem)


@define(eq=False)
class _Queue:
    """What is posted on one channel and not matched yet; one of the two is always empty."""

    sends: deque[_Message] = Factory(deque)
    receives: deque[_Message] = Factory(deque)

    def match(self) -> None:
        while self.sends and self.receives:
            _move(self.sends.popleft(), self.receives.popleft())

    def drop(self) -> None:
        for message in (*self.sends, *self.receives):
            message.problem = "it was posted before the last settle"
        self.sends.clear()
        self.receives.clear()


def _move(sent: _Message, received: _Message) -> None:
    length, room = len(sent.buffer), received.room
    if length > room:
        sent.problem = received.problem = f"{length} bytes were sent into a receive of {room} bytes"
        return
    received.buffer = sent.buffer.clone() if isinstance(sent.buffer, torch.Tensor) else bytearray(sent.buffer)
    sent.moved = received.moved = True


@define(eq=False)
class _Meeting:
    """The words of one exchange, as far as they were said."""

    num_ranks: int
    words: dict[int, bytes] = Factory(dict)

    def absent(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if rank not in self.words]

    def over(self) -> bool:
        return len(self.words) == self.num_ranks


@define(eq=False)
class _Hub:
    """What the ranks share.  Every field is guarded by ``changed``; an epoch ends with each settle."""

    num_ranks: int
    changed: Condition = Factory(Condition)
    queues: dict[Channel, _Queue] = Factory(lambda: defaultdict(_Queue))
    meetings: dict[int, _Meeting] = field(init=False)
    settling: _Meeting = field(init=False)
    closed: set[int] = Factory(set)
    ends: dict[int, MemoryTransport] = Factory(dict)
    departures: dict[int, tuple[float, bytes]] = Factory(dict)  # by rank, and when it counts
    failure: Failure | None = None
    epoch: int = -1

    def __attrs_post_init__(self) -> None:
        self.begin_epoch()

    def begin_epoch(self) -> None:
        for queue in self.queues.values():
            queue.drop()
        self.meetings = defaultdict(lambda: _Meeting(self.num_ranks))
        self.settling = _Meeting(self.num_ranks)
        self.failure = None
        self.departures.clear()
        self.epoch += 1

    def left(self, ranks: Iterable[int]) -> Failure | None:
        gone = self.closed.intersection(ranks)
        return Failure(min(gone), "an unknown action", "it closed its transport", "") if gone else None

    def block(self, over: Callable[[], bool], peers: Callable[[], list[int]], late: str, deadline: float) -> None:
        """Wait until ``over``; a failure, or the leave of one of ``peers``, ends the wait early."""
        self.block_in_spite_of_failure(lambda: over() or self.failure is not None, peers, late, deadline)
        if not over() and self.failure is not None:
            raise self.failure.as_error()

    def block_in_spite_of_failure(
        self, over: Callable[[], bool], peers: Callable[[], list[int]], late: str, deadline: float
    ) -> None:
        until = monotonic() + deadline
        while not over():
            if (failure := self.left(peers())) is not None:
                raise failure.as_error()
            if (remaining := until - monotonic()) <= 0:
                ranks = ", ".join(f"rank {rank}" for rank in peers())
                raise DeadlineError(f"{late} within {deadline} seconds; waiting for {ranks}.")
            self.changed.wait(min(remaining, _SECONDS_BETWEEN_LOOKS))


@define(eq=False)
class MemoryTransport(Transport):
    """One rank's end of a hub in this process's memory; made by ``MemoryTransport.connect``.

    Attributes:
        rank, num_ranks: which rank of how many.
    """

    shares_process = True
    rank: int
    num_ranks: int
    _hub: _Hub
    _exchanges: int = field(default=0, init=False)
    host: Host | None = field(default=None, init=False)
    has_raised: bool = field(default=False, init=False)

    @classmethod
    def connect(cls, num_ranks: int) -> list[MemoryTransport]:
        """Make the ends of all ranks, in rank order: one for each thread.

        Args:
            num_ranks: number of ranks of the pipeline.
        """
        hub = _Hub(num_ranks)
        hub.ends = {rank: cls(rank, num_ranks, hub) for rank in range(num_ranks)}
        return list(hub.ends.values())

    def open(self, channels: Sequence[Channel], *, deadline: float) -> None:
        said = " ".join(map(str, channels))
        for rank, word in enumerate(self.exchange(said.encode(), deadline=deadline)):
            if word.decode() != said:
                raise TransportError(f"rank {rank} opens channels [{word.decode()}], rank {self.rank} opens [{said}].")
        with self._hub.changed:
            for channel in channels:
                self._hub.queues[channel]

    def send(self, channel: Channel, message: Message, *, room: int | None = None) -> Handle:
        return self._post(_Message(channel, message, len(message)), sending=True)

    def receive(self, channel: Channel, room: int) -> Handle:
        return self._post(_Message(channel, b"", room), sending=False)

    def _post(self, message: _Message, *, sending: bool) -> _Message:
        channel = message.channel
        with self._hub.changed:
            if channel not in self._hub.queues or self.rank != (channel.source if sending else channel.target):
                verb = "send" if sending else "receive"
                raise TransportError(f"rank {self.rank} cannot {verb} on channel {channel}, which it did not open.")
            if self._hub.failure is None and not self._hub.left([channel.source, channel.target]):
                queue = self._hub.queues[channel]
                (queue.sends if sending else queue.receives).append(message)
                queue.match()
                self._hub.changed.notify_all()
        return message

    def wait(self, handle: Handle, *, deadline: float) -> None:
        assert isinstance(handle, _Message)
        channel = handle.channel
        peers = [channel.source + channel.target - self.rank]
        with self._hub.changed:
            self._hub.block(
                lambda: handle.over() or self._look_ahead(),
                lambda: peers,
                f"nothing moved on channel {channel}",
                deadline,
            )
            if self._hub.failure is not None:  # as with gloo, where a message that ended a failed wait may be empty
                raise self._hub.failure.as_error()
            if handle.problem:
                raise TransportError(f"a message on channel {channel} was not moved: {handle.problem}.")

    def _look_ahead(self) -> bool:
        """Whether a rank has strayed, to judge by what it says in the exchange that comes next here, or has said."""
        left = [(peer, word) for peer, (due, word) in self._hub.departures.copy().items() if monotonic() >= due]
        for peer, word in (*self._hub.meetings[self._exchanges].words.items(), *left):
            if self.host is not None and (failure := self.host.judge(peer, word)) is not None:
                self._hub.failure = self._hub.failure or failure
                self._hub.changed.notify_all()
        return self._hub.failure is not None

    def states(self, seconds: float) -> dict[int, bytes]:
        return {rank: host.state() for rank, end in self._hub.ends.items() if (host := end.host) is not None}

    def exchange(self, word: bytes, *, deadline: float) -> list[bytes]:
        with self._hub.changed:
            self._check_not_closed()
            number, self._exchanges = self._exchanges, self._exchanges + 1
            meeting = self._hub.meetings[number]
            meeting.words[self.rank] = word
            self._hub.departures.pop(self.rank, None)
            self._hub.changed.notify_all()
            self._hub.block(meeting.over, meeting.absent, "an exchange did not end", deadline)
            self._hub.meetings.pop(number - 1, None)  # every rank has left it
            return [meeting.words[rank] for rank in range(self.num_ranks)]

    def leave(self, word: bytes) -> None:
        self._hub.departures[self.rank] = (monotonic() + SECONDS_TO_EXPLAIN, word)

    def fail(self, failure: Failure) -> None:
        with self._hub.changed:
            self._hub.failure = self._hub.failure or failure
            self._hub.changed.notify_all()

    def failure(self) -> Failure | None:
        with self._hub.changed:
            return self._hub.failure

    def settle(self, *, deadline: float) -> None:
        with self._hub.changed:
            self._check_not_closed()
            meeting = self._hub.settling
            meeting.words[self.rank] = b""
            if meeting.over():
                self._hub.begin_epoch()
                self._hub.changed.notify_all()
            self._hub.block_in_spite_of_failure(meeting.over, meeting.absent, "the channels did not settle", deadline)
            self._exchanges = 0

    def _check_not_closed(self) -> None:
        if self.rank in self._hub.closed:
            raise TransportError(f"rank {self.rank} has closed its transport; make another one on every rank.")

    def close(self) -> None:
        with self._hub.changed:
            self._hub.closed.add(self.rank)
            self._hub.changed.notify_all()
