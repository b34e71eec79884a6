"""Meeting: how ranks find each other through the store and are joined by sockets.

Note [ranks of one machine]
Between ranks of one machine a wire is a Unix socket, which costs less than TCP.  A rank listens at an abstract
address, which leaves no file behind and which other users of the machine can reach as they can a port.  So it is as
random as the token, the one who answers must be the same user, and the one who calls must know the token.  Machines
are told apart by what the kernel drew when it booted; ranks of one machine that still do not find each other so
(containers with networks of their own) use TCP.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic

from attrs import Factory, define, frozen
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from pipeline_engine.errors import TransportError
from pipeline_engine.run.transports.wires import Wire

_HELLO = struct.Struct("!32sI")
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR
_CREDENTIALS = struct.Struct("iII")  # process, user, group


def this_machine() -> str:
    """A word that is the same for all processes of a machine since it was booted; "-" if they cannot be told."""
    with suppress(OSError):
        if sys.platform == "linux":
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "-"


@define(eq=False)
class _Deadline:
    """Seconds left of a budget that several waits share."""

    seconds: float
    _until: float = Factory(lambda self: monotonic() + self.seconds, takes_self=True)

    def left(self) -> float:
        return max(self._until - monotonic(), 0.001)


@frozen
class _Address:
    """How a rank is reached: over TCP, and by ranks of its ``machine`` at an abstract ``name``."""

    token: str
    host: str
    port: int
    machine: str
    name: str

    def packed(self) -> str:
        return f"{self.token} {self.host} {self.port} {self.machine} {self.name}"

    @classmethod
    def unpack(cls, text: str) -> _Address:
        token, host, port, machine, name = text.split()
        return cls(token, host, int(port), machine, name)


def connect_wires(
    store: Store, rank: int, num_ranks: int, deadline: float, *, machine: str | None = None
) -> dict[int, Wire]:
    """Join this rank with every other one.  Collective; ``store`` must be fresh on every rank.

    Args:
        store: where ranks find each other.
        rank: this rank.
        num_ranks: how many there are.
        deadline: seconds.
        machine: see Note [ranks of one machine]; None for this one.

    Raises:
        TransportError: some rank did not come within ``deadline`` seconds; the message names it.
    """
    budget = _Deadline(deadline)
    host, machine = _own_address(store), machine or this_machine()
    with ExitStack() as listening:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        servers = [listening.enter_context(socket.create_server((host, 0), family=family, backlog=num_ranks))]
        port = servers[0].getsockname()[1]
        address = _Address(secrets.token_hex(16), host, port, machine, secrets.token_hex(16))
        if machine != "-":
            servers.append(listening.enter_context(_listen_at(address.name, num_ranks)))
        store.set(f"wire/{rank}", address.packed())
        wires = {peer: Wire(_call(store, rank, peer, machine, budget)) for peer in range(rank)}
        while missing := sorted(set(range(num_ranks)) - {rank} - set(wires)):
            peer, answered = _answer(servers, address.token.encode(), missing, budget)
            wires[peer] = Wire(answered)
    store.delete_key(f"wire/{rank}")
    return wires


def _listen_at(name: str, backlog: int) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(_abstract(name))
    server.listen(backlog)
    return server


def _call(store: Store, rank: int, peer: int, machine: str, budget: _Deadline) -> socket.socket:
    key = f"wire/{peer}"
    try:
        store.wait([key], timedelta(seconds=budget.left()))
        address = _Address.unpack(store.get(key).decode())
        called = _call_nearby(address.name, budget) if address.machine == machine != "-" else None
        called = called or socket.create_connection((address.host, address.port), timeout=budget.left())
        called.sendall(_HELLO.pack(address.token.encode(), rank))
    except (RuntimeError, OSError) as error:
        raise TransportError(f"rank {rank} found no rank {peer} within {budget.seconds} seconds: {error}") from error
    return called


def _call_nearby(name: str, budget: _Deadline) -> socket.socket | None:
    """Where ``name`` listens, unless nobody or another user does."""
    called = socket.socket(socket.AF_UNIX)
    with suppress(OSError):
        called.settimeout(budget.left())
        called.connect(_abstract(name))
        credentials = called.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user == os.geteuid():
            return called
    called.close()
    return None


def _abstract(name: str) -> str:
    return f"\0pipeline_engine/{name}"


def _answer(
    servers: Sequence[socket.socket], token: bytes, missing: list[int], budget: _Deadline
) -> tuple[int, socket.socket]:
    """Accept until one of the ``missing`` ranks has called; whoever does not know the token is sent away."""
    while True:
        try:
            caller, _ = _first_called(servers, budget).accept()
        except OSError as error:
            raise TransportError(f"ranks {missing} did not come within {budget.seconds} seconds.") from error
        with suppress(OSError, struct.error):
            caller.settimeout(budget.left())
            told, peer = _HELLO.unpack(caller.recv(_HELLO.size, socket.MSG_WAITALL))
            if secrets.compare_digest(told, token) and peer in missing:
                return peer, caller
        caller.close()


def _first_called(servers: Sequence[socket.socket], budget: _Deadline) -> socket.socket:
    """Block until somebody has called.

    Raises:
        TimeoutError: nobody has.
    """
    poll = select.poll()
    for server in servers:
        poll.register(server, select.POLLIN)
    called = [descriptor for descriptor, _ in poll.poll(budget.left() * 1000)]
    for server in servers:
        if server.fileno() in called:
            return server
    raise TimeoutError("nobody has called")


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
