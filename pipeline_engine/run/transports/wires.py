"""Wires: one socket between every two ranks, for the few words that must arrive while a rank blocks in gloo.

A rank that dies is noticed by everyone as the end of its wire; one that leaves says goodbye first.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum
from threading import Lock
from weakref import WeakSet

from attrs import define, field, frozen

_HEADER = struct.Struct("!BIIQ")


class Kind(IntEnum):
    """What a frame is about."""

    WORD = 0
    WORDS = 7
    EARLY = 8
    FAILURE = 1
    TALLY = 2
    GOODBYE = 3
    ASK = 4
    ANSWER = 5
    DEPARTURE = 6


@frozen
class Frame:
    """One message on a wire: ``number`` tells the exchanges of one epoch apart."""

    kind: Kind
    epoch: int
    number: int
    body: bytes

    def packed(self) -> bytes:
        return _HEADER.pack(self.kind, self.epoch, self.number, len(self.body)) + self.body


@define(eq=False, weakref_slot=True)
class Wire:
    """This rank's end of the socket to one peer.  Any thread may send, one thread reads."""

    socket: socket.socket
    _sending: Lock = field(factory=Lock, init=False)
    _unread: bytearray = field(factory=bytearray, init=False)

    def __attrs_post_init__(self) -> None:
        if self.socket.family != socket.AF_UNIX:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(None)
        _OPEN.add(self)

    def send(self, frame: Frame) -> None:
        """Send one frame; a peer that is gone is passed over, for the end of its wire tells it."""
        with self._sending, suppress(OSError):
            self.socket.sendall(frame.packed())

    def read(self) -> tuple[list[Frame], bool]:
        """The frames that have arrived whole, and whether the wire has ended; blocks if nothing has arrived."""
        try:
            news = self.socket.recv(1 << 16)
        except OSError:
            news = b""
        self._unread += news
        return list(self._frames()), not news

    def _frames(self) -> Iterator[Frame]:
        while len(self._unread) >= _HEADER.size:
            kind, epoch, number, length = _HEADER.unpack_from(self._unread)
            end = _HEADER.size + length
            if len(self._unread) < end:
                return
            yield Frame(Kind(kind), epoch, number, bytes(self._unread[_HEADER.size : end]))
            del self._unread[:end]


# A forked child (a data loader's worker) must not keep the wires of a parent that died open.
_OPEN: WeakSet[Wire] = WeakSet()


def _close_all() -> None:
    for wire in _OPEN:
        wire.socket.close()


os.register_at_fork(after_in_child=_close_all)
