"""Wires: one socket between every two ranks, for the few words that must arrive while a rank blocks in gloo.

A rank that dies is noticed by everyone as the end of its wire; one that leaves says goodbye first.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from threading import Lock
from time import monotonic
from weakref import WeakSet

from attrs import Factory, define, field, frozen
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from pipeline_engine.errors import TransportError

_HEADER = struct.Struct("!BIIQ")
_HELLO = struct.Struct("!32sI")
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR


class Kind(IntEnum):
    """What a frame is about."""

    WORD = 0
    FAILURE = 1
    TALLY = 2
    GOODBYE = 3
    ASK = 4
    ANSWER = 5


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


@define(eq=False)
class _Deadline:
    """Seconds left of a budget that several waits share."""

    seconds: float
    _until: float = Factory(lambda self: monotonic() + self.seconds, takes_self=True)

    def left(self) -> float:
        return max(self._until - monotonic(), 0.001)


def connect_wires(store: Store, rank: int, num_ranks: int, deadline: float) -> dict[int, Wire]:
    """Join this rank with every other one.  Collective; ``store`` must be fresh on every rank.

    Raises:
        TransportError: some rank did not come within ``deadline`` seconds; the message names it.
    """
    budget = _Deadline(deadline)
    token = secrets.token_hex(16).encode()
    host = _own_address(store)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=num_ranks) as server:
        store.set(f"wire/{rank}", f"{token.decode()} {host} {server.getsockname()[1]}")
        wires = {peer: Wire(_call(store, rank, peer, budget)) for peer in range(rank)}
        while missing := sorted(set(range(num_ranks)) - {rank} - set(wires)):
            peer, answered = _answer(server, token, missing, budget)
            wires[peer] = Wire(answered)
    store.delete_key(f"wire/{rank}")
    return wires


def _call(store: Store, rank: int, peer: int, budget: _Deadline) -> socket.socket:
    key = f"wire/{peer}"
    try:
        store.wait([key], timedelta(seconds=budget.left()))
        token, host, port = store.get(key).decode().split()
        called = socket.create_connection((host, int(port)), timeout=budget.left())
        called.sendall(_HELLO.pack(token.encode(), rank))
    except (RuntimeError, OSError) as error:
        raise TransportError(f"rank {rank} found no rank {peer} within {budget.seconds} seconds: {error}") from error
    return called


def _answer(server: socket.socket, token: bytes, missing: list[int], budget: _Deadline) -> tuple[int, socket.socket]:
    """Accept until one of the ``missing`` ranks has called; whoever does not know the token is sent away."""
    while True:
        try:
            server.settimeout(budget.left())
            caller, _ = server.accept()
        except OSError as error:
            raise TransportError(f"ranks {missing} did not come within {budget.seconds} seconds.") from error
        with suppress(OSError, struct.error):
            caller.settimeout(budget.left())
            told, peer = _HELLO.unpack(caller.recv(_HELLO.size, socket.MSG_WAITALL))
            if secrets.compare_digest(told, token) and peer in missing:
                return peer, caller
        caller.close()


def _own_address(store: Store) -> str:
    """Where peers reach this rank: on gloo's interface if one is named, else on the way to the store's host."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, request)[20:24])
    return _address_towards(store)


def _address_towards(store: Store) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return "127.0.0.1"
    family, _, _, _, address = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
