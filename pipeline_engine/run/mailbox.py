"""A rank's mailbox: values in and out over the transport, each message checked before anybody uses it.

Note [reading in order]: a message may have a second part, whose receive can be posted only once its first part has
been read.  Second parts have a channel of their own, and for their order to be that of the sends, first parts are
read in the order in which they were posted, whichever call they belong to.
"""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence

import torch
from attrs import define, field, frozen

from pipeline_engine.errors import PeerFailedError
from pipeline_engine.plan.values import Channel, Value, channel_of, continued
from pipeline_engine.run import wire
from pipeline_engine.run.transports.base import Failure, Handle, Transport


@define(eq=False)
class _Letter:
    """A message on its way in; ``place`` is its place among all that come on its channel."""

    value: Value
    place: int
    first: Handle
    second: Handle | None = None
    is_read: bool = False


@define(eq=False)
class Traffic:
    """What goes over a pipeline's channels from one settle to the next, for all its calls.

    Messages are counted, so that one that is lost or comes twice is told from the next, even if it is for the same
    microbatch of the same call: after ``invalidate`` a value is made and sent again.

    Attributes:
        unread: what has come or will come on each channel; see Note [reading in order].
        sent, posted: how many messages each channel has had at this end.
    """

    unread: defaultdict[Channel, deque[_Letter]] = field(init=False, factory=lambda: defaultdict(deque))
    sent: Counter[Channel] = field(init=False, factory=Counter)
    posted: Counter[Channel] = field(init=False, factory=Counter)

    def clear(self) -> None:
        """The channels are empty, and both ends count from 0."""
        for each in (self.unread, self.sent, self.posted):
            each.clear()


@frozen(eq=False)
class Mailbox:
    """One call's messages, from the posting of their receives and sends to the waits.

    Args:
        transport: moves the bytes.
        deadline: seconds for each single wait.
        sent_bytes: how much was sent on each channel.
        traffic: what is on its way, for any call of the pipeline.
    """

    transport: Transport
    deadline: float
    sent_bytes: Counter[Channel]
    traffic: Traffic
    _letters: dict[Value, _Letter] = field(init=False, factory=dict)
    _sends: dict[tuple[Value, int], list[Handle]] = field(init=False, factory=dict)

    def send(self, value: Value, target: int, parts: Sequence[torch.Tensor], *, room: int = wire.FIRST_BYTES) -> None:
        """Start sending the parts of a message, for whose first part the other end posts ``room`` bytes."""
        channel = channel_of(value, self.transport.rank, target)
        wire.mark_place(parts, channel, self.traffic.sent[channel])
        self.traffic.sent[channel] += 1
        first, *second = parts
        handles = [self.transport.send(channel, first, room=room)]
        handles += [self.transport.send(continued(channel), part) for part in second]
        self._sends[value, target] = handles
        self.sent_bytes[channel] += sum([part.numel() for part in parts])

    def wait_send(self, value: Value, target: int) -> None:
        """Wait until every part has left."""
        for handle in self._sends.pop((value, target)):
            self.transport.wait(handle, deadline=self.deadline)

    def post(self, value: Value, source: int, room: int) -> None:
        """Post the receive of a message whose first part has at most ``room`` bytes."""
        channel = channel_of(value, source, self.transport.rank)
        letter = _Letter(value, self.traffic.posted[channel], self.transport.receive(channel, room))
        self.traffic.posted[channel] += 1
        self._letters[value] = letter
        self.traffic.unread[channel].append(letter)

    def take(self, value: Value, source: int) -> torch.Tensor:
        """Wait for a message; its bytes.

        Raises:
            PeerFailedError: it is a notice of failure, or the transport knows of one.
            TransportError: it is another message than the one that comes next.
        """
        channel = channel_of(value, source, self.transport.rank)
        letter = self._letters[value]
        while not letter.is_read:
            self._read_next(channel)
        if letter.second is not None:
            self.transport.wait(letter.second, deadline=self.deadline)
            wire.check_place(letter.second.buffer, channel, letter.place)
        del self._letters[value]
        return letter.first.buffer if letter.second is None else letter.second.buffer

    def _read_next(self, channel: Channel) -> None:
        """Read the first part of the oldest unread message; see Note [reading in order]."""
        letter = self.traffic.unread[channel][0]
        self.transport.wait(letter.first, deadline=self.deadline)
        size = wire.second_part_bytes(letter.first.buffer)
        wire.check_place(letter.first.buffer, channel, letter.place)
        if size:
            letter.second = self.transport.receive(continued(channel), size)
        letter.is_read = True
        self.traffic.unread[channel].popleft()

    def notify(self, failure: Failure, owed: Iterable[tuple[Value, int]], channels: Iterable[Channel]) -> None:
        """Send a notice of failure in the place of every message that is still owed, and one more on every channel.

        A peer may be one event of the caller further than this rank and have posted a receive that this rank does
        not know of; that is what the extra notice is for.
        """
        notice = wire.encode_failure(failure)
        for value, target in owed:
            self.transport.send(channel_of(value, self.transport.rank, target), notice)
        for channel in channels:
            if channel.source == self.transport.rank and not channel.name.endswith("+"):
                self.transport.send(channel, notice)


def failure_of(rank: int, doing: str, error: BaseException) -> Failure:
    """The notice of an exception that this rank raised, or passes on."""
    if isinstance(error, PeerFailedError):
        return Failure(error.rank, error.doing, error.cause, error.remote_traceback)
    text = "".join(traceback.format_exception(error))
    return Failure(rank, doing, f"{type(error).__name__}: {error}", text)
