"""A rank's mailbox: values in and out over the transport, each message checked before anybody uses it.

Note [reading in order]: a message may have a second part, whose receive can be posted only once its first part has
been read.  Second parts have a channel of their own, and for their order to be that of the sends, first parts are
read in the order in which they were posted, whichever call they belong to.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterable
from typing import cast

from attrs import define, field, frozen

from pipeline_engine.errors import PeerFailedError
from pipeline_engine.plan.values import Channel, Value, channel_of, continued
from pipeline_engine.run import wire
from pipeline_engine.run.cargo import Cargo, Grads
from pipeline_engine.run.transports.base import Failure, Handle, Transport


@define(eq=False)
class _Letter:
    """A message on its way in; ``arrived`` is its first part, once it has been read."""

    lane: _Lane
    stamp: wire.Stamp
    first: Handle
    arrived: wire.Arrived | None = None
    second: Handle | None = None


@define(eq=False)
class _Lane:
    """This rank's end of one channel.

    Messages are counted, so that one that is lost or comes twice is told from the next, even if it is for the same
    microbatch of the same call: after ``invalidate`` a value is made and sent again.

    Attributes:
        channel, number: which one.
        count: how many messages it has had, from one settle to the next.
        unread: what has come or will come on it; see Note [reading in order].
        sent_bytes: how much was ever sent on it.
    """

    channel: Channel
    number: int
    count: int = 0
    unread: deque[_Letter] = field(factory=deque)
    sent_bytes: int = 0


class Traffic:
    """What goes over a pipeline's channels, for all its calls."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[type[Value], int, int, int], _Lane] = {}

    def lane(self, value: Value, source: int, target: int) -> _Lane:
        """This rank's end of the channel on which ``value`` travels from rank ``source`` to rank ``target``."""
        key = (type(value), getattr(value, "stage", 0), source, target)
        lane = self._lanes.get(key)
        if lane is None:
            channel = channel_of(value, source, target)
            lane = self._lanes[key] = _Lane(channel, wire.number_of(channel))
        return lane

    @property
    def sent_bytes(self) -> dict[Channel, int]:
        """How much was sent on each channel."""
        return {lane.channel: lane.sent_bytes for lane in self._lanes.values() if lane.sent_bytes}

    def clear(self) -> None:
        """The channels are empty, and both ends count from 0."""
        for lane in self._lanes.values():
            lane.count = 0
            lane.unread.clear()


@frozen(eq=False)
class Mailbox:
    """One call's messages, from the posting of their receives and sends to the waits.

    Args:
        transport: moves the bytes.
        deadline: seconds for each single wait.
        traffic: what is on its way, for any call of the pipeline.
        call: its number.
        verify: whether messages carry a checksum.
    """

    transport: Transport
    deadline: float
    traffic: Traffic
    call: int = 0
    verify: bool = False
    _letters: dict[Value, _Letter] = field(init=False, factory=dict)
    _sends: dict[tuple[Value, int], list[Handle]] = field(init=False, factory=dict)

    def send(self, value: Value, target: int, content: Cargo | Grads, *, room: int = wire.FIRST_BYTES) -> None:
        """Start sending the content of a value, for whose first part the other end posts ``room`` bytes."""
        lane = self.traffic.lane(value, self.transport.rank, target)
        stamp = self._next(lane, value)
        if isinstance(content, Cargo):
            first, *second = wire.encode_cargo(content, stamp)
        else:
            first, *second = wire.encode_grads(content, stamp, room)
        handles = [self.transport.send(lane.channel, first, room=room)]
        lane.sent_bytes += len(first)
        for part in second:
            handles.append(self.transport.send(continued(lane.channel), part))
            lane.sent_bytes += len(part)
        self._sends[value, target] = handles

    def wait_send(self, value: Value, target: int) -> None:
        """Wait until every part has left."""
        for handle in self._sends.pop((value, target)):
            self.transport.wait(handle, deadline=self.deadline)

    def post(self, value: Value, source: int, room: int) -> None:
        """Post the receive of a message whose first part has at most ``room`` bytes."""
        lane = self.traffic.lane(value, source, self.transport.rank)
        letter = _Letter(lane, self._next(lane, value), self.transport.receive(lane.channel, room))
        self._letters[value] = letter
        lane.unread.append(letter)

    def _next(self, lane: _Lane, value: Value) -> wire.Stamp:
        lane.count += 1
        return wire.Stamp(value.microbatch, self.call, self.verify, lane.number, lane.count - 1)

    def take(self, value: Value) -> wire.Arrived:
        """Wait for a message.

        Raises:
            PeerFailedError: it is a notice of failure, or the transport knows of one.
            TransportError: it is another message than the one that comes next.
        """
        letter = self._letters.pop(value)
        if letter.arrived is None:
            self._read_up_to(letter)
        if letter.second is None:
            return cast(wire.Arrived, letter.arrived)
        self.transport.wait(letter.second, deadline=self.deadline)
        return wire.Arrived.opened(letter.second.buffer, letter.stamp)

    def _read_up_to(self, letter: _Letter) -> None:
        """Read the first parts of all messages up to this one; see Note [reading in order]."""
        lane, unread = letter.lane, letter.lane.unread
        while letter.arrived is None:
            oldest = unread[0]
            self.transport.wait(oldest.first, deadline=self.deadline)
            arrived = wire.Arrived.opened(oldest.first.buffer, oldest.stamp)
            if arrived.second_part_bytes:
                oldest.second = self.transport.receive(continued(lane.channel), arrived.second_part_bytes)
            oldest.arrived = arrived
            unread.popleft()

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
