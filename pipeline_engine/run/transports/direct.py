"""Small messages over sockets of our own: sent at once, received without gloo's threads.

A small message through gloo costs two wake-ups of a thread on each side; through a socket that the receiving thread
reads itself it costs none.  A send is handed to the kernel and is over; the receiver reads when it waits, so that no
thread of Python stands between.  What the kernel does not take at once is sent by a thread that lives only as long as
that backlog.

Frames carry the epoch: after a failure what was sent before it is read and dropped.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Condition, RLock, Thread
from time import monotonic

from attrs import Factory, define, field

from pipeline_engine.plan.values import Channel
from pipeline_engine.run.transports.base import Handle, Message
from pipeline_engine.run.transports.links import End
from pipeline_engine.run.transports.wires import Wire

_FRAME = struct.Struct("!IIQ")
_CHUNK = 1 << 16


@define(eq=False)
class Letter(Handle):
    """A small message.

    ``place`` is its place among those that are received on its channel in its epoch, or sent to its peer.
    """

    channel: Channel
    buffer: Message
    end: End
    epoch: int
    place: int


@define(eq=False)
class Direct:
    """This rank's sockets to its peers, for one thread that sends and waits.

    Args:
        wires: by peer; nobody else reads or writes them.
    """

    _wires: Mapping[int, Wire]
    _backlogs: dict[int, _Backlog] = field(init=False)
    _unread: dict[int, bytearray] = field(init=False, factory=lambda: defaultdict(bytearray))
    _arrived: dict[tuple[int, int, int], _Arrivals] = field(init=False, factory=lambda: defaultdict(_Arrivals))
    _bell: tuple[socket.socket, socket.socket] = field(init=False, factory=socket.socketpair)
    _polls: dict[int, select.poll] = field(init=False)
    _is_reading: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        for each in (*(wire.socket for wire in self._wires.values()), *self._bell):
            each.setblocking(False)
        self._backlogs = {peer: _Backlog(wire.socket) for peer, wire in self._wires.items()}
        self._polls = {peer: _poll_of(wire.socket, self._bell[0]) for peer, wire in self._wires.items()}

    def send(self, peer: int, epoch: int, number: int, message: bytes) -> int:
        """Send a message of channel ``number``; its place among all that was sent to ``peer``."""
        return self._backlogs[peer].send(_FRAME.pack(epoch, number, len(message)) + message)

    def wait_sent(self, peer: int, place: int, *, over: Callable[[], object], deadline: float) -> bool:
        """Block until a message is on its way, or ``over``, or ``deadline`` seconds have passed; whether it is."""
        return self._backlogs[peer].wait(place, over, deadline)

    def take(
        self, peer: int, epoch: int, number: int, place: int, *, over: Callable[[], object], deadline: float
    ) -> bytearray | None:
        """Message ``place`` of a channel; None if ``over`` came first or the deadline, in seconds, has passed.

        Raises:
            ConnectionError: the peer is gone.
        """
        messages = self._arrived[peer, epoch, number].messages
        if place not in messages:
            until = monotonic() + deadline
            while place not in messages:
                left = until - monotonic()
                if over() or left <= 0:
                    return None
                self._read(peer, left)
        return messages.pop(place)

    def wake(self) -> None:
        """Have a ``take`` in another thread look at its ``over``."""
        with suppress(OSError):
            self._bell[1].send(b"\0")
        for backlog in self._backlogs.values():
            backlog.wake()

    @property
    def is_torn(self) -> bool:
        """Whether Ctrl-C came in the middle of a frame, so that nobody knows where the next one begins."""
        return self._is_reading or any(backlog.is_writing for backlog in self._backlogs.values())

    def forget(self, before: int) -> None:
        """Drop what arrived in epochs before that one."""
        for key in [key for key in self._arrived if key[1] < before]:
            del self._arrived[key]

    def close(self) -> None:
        for each in (*(wire.socket for wire in self._wires.values()), *self._bell):
            each.close()

    def _read(self, peer: int, seconds: float) -> None:
        """Block until something has come from ``peer`` or the bell has rung, and take it in."""
        for descriptor, _ in self._polls[peer].poll(min(seconds, 1e6) * 1000):
            if descriptor == self._bell[0].fileno():
                self._bell[0].recv(_CHUNK)
            elif self._is_reading:
                raise ConnectionError(f"what rank {peer} sent was torn by Ctrl-C")
            else:
                self._is_reading = True  # and so it stays if Ctrl-C comes before it is set back
                news = self._wires[peer].socket.recv(_CHUNK)
                self._unread[peer] += news
                self._sort(peer)
                self._is_reading = False
                if not news:
                    raise ConnectionError(f"rank {peer} has closed its end")

    def _sort(self, peer: int) -> None:
        unread = self._unread[peer]
        start = 0
        while len(unread) - start >= _FRAME.size:
            epoch, number, length = _FRAME.unpack_from(unread, start)
            end = start + _FRAME.size + length
            if len(unread) < end:
                break
            arrivals = self._arrived[peer, epoch, number]
            arrivals.messages[arrivals.count] = unread[start + _FRAME.size : end]
            arrivals.count += 1
            start = end
        del unread[:start]


@define(eq=False)
class _Arrivals:
    """What has come on one channel in one epoch and was not taken yet, by its place in the order."""

    count: int = 0
    messages: dict[int, bytearray] = Factory(dict)


@define(eq=False)
class _Backlog:
    """What is still to be written to one socket, in order."""

    _socket: socket.socket
    _lock: RLock = Factory(RLock)  # taken by itself, not through its condition, as the watchdog's is
    _changed: Condition = Factory(lambda self: Condition(self._lock), takes_self=True)
    _waiting: deque[bytes] = Factory(deque)
    _count: int = 0  # frames that were ever put here
    _written: int = 0
    is_writing: bool = False

    def send(self, frame: bytes) -> int:
        """Write a frame, now or later; its number."""
        with self._lock:
            self._count += 1
            if self.is_writing:
                return self._count  # torn, and nobody could read what comes behind
            self.is_writing = True  # and so it stays if Ctrl-C comes before it is set back
            if self._waiting:
                self._waiting.append(frame)
            elif rest := self._push(frame):
                self._waiting.append(rest)
                Thread(target=self._pump, name="backlog of small messages", daemon=True).start()
            else:
                self._written += 1
            self.is_writing = False
            return self._count

    def wait(self, number: int, over: Callable[[], object], deadline: float) -> bool:
        """Block until frame ``number`` is with the kernel, or ``over``, or the deadline; whether it is."""
        if self._written < number:
            with self._lock:
                self._changed.wait_for(lambda: self._written >= number or over(), min(deadline, 1e6))
        return self._written >= number

    def wake(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def _push(self, frame: bytes) -> bytes:
        """Write what the kernel takes; the rest is returned."""
        try:
            return frame[self._socket.send(frame) :]
        except BlockingIOError:
            return frame
        except OSError:
            return b""  # the peer is gone, as waits will tell

    def _pump(self) -> None:
        while self._waiting:
            with suppress(OSError, ValueError):
                select.select([], [self._socket], [], 1.0)
            with self._lock:
                self._write_on()

    def _write_on(self) -> None:
        while self._waiting:
            if rest := self._push(self._waiting[0]):
                self._waiting[0] = rest
                return
            self._waiting.popleft()
            self._written += 1
            self._changed.notify_all()


def _poll_of(*sources: socket.socket) -> select.poll:
    poll = select.poll()
    for source in sources:
        poll.register(source, select.POLLIN)
    return poll
