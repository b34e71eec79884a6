"""Ranks of one machine are joined by Unix sockets, those of different machines by TCP, and strangers by nothing."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from pipeline_engine.run.transports.meeting import connect_wires, this_machine
from pipeline_engine.run.transports.wires import Frame, Kind, Wire

DEADLINE = 20.0
NEAR, FAR = socket.AF_UNIX, socket.AF_INET


def meet(machines: Sequence[str | None], store: Store | None = None) -> list[dict[int, Wire]]:
    """The wires of each rank, in the order of ranks."""
    store, num_ranks = store or HashStore(), len(machines)
    with ThreadPoolExecutor(num_ranks) as threads:
        joining = [
            threads.submit(connect_wires, store, rank, num_ranks, DEADLINE, machine=machine)
            for rank, machine in enumerate(machines)
        ]
        return [each.result() for each in joining]


def families(everyone: list[dict[int, Wire]]) -> dict[tuple[int, int], int]:
    return {(rank, peer): wire.socket.family for rank, wires in enumerate(everyone) for peer, wire in wires.items()}


def say_hello_to_each_other(everyone: list[dict[int, Wire]]) -> None:
    """Each wire ends at the rank that it is kept for; then they are closed."""
    for rank, wires in enumerate(everyone):
        for wire in wires.values():
            wire.send(Frame(Kind.WORD, 0, rank, b"hello"))
    for wires in everyone:
        for peer, wire in wires.items():
            assert wire.read() == ([Frame(Kind.WORD, 0, peer, b"hello")], False)
    for wires in everyone:
        for wire in wires.values():
            wire.socket.close()


@pytest.mark.parametrize(
    ("machines", "near"),
    [
        ([None, None, None], {(0, 1), (0, 2), (1, 2)}),
        (["here", "here", "there", "there"], {(0, 1), (2, 3)}),
        (["-", "-"], set()),
    ],
    ids=["one machine", "two machines", "machines that cannot be told apart"],
)
def test_ranks_of_one_machine_are_joined_by_unix_sockets_and_others_by_tcp(
    machines: list[str | None], near: set[tuple[int, int]]
) -> None:
    everyone = meet(machines)
    found = families(everyone)
    assert found == {pair: NEAR if tuple(sorted(pair)) in near else FAR for pair in found}
    say_hello_to_each_other(everyone)


class Misleading(HashStore):  # type: ignore[misc]
    """A store from which ranks read a name at which nobody listens, as if their networks were apart."""

    def get(self, key: str) -> bytes:
        return super().get(key)[:-1] + b"?"


def test_ranks_of_one_machine_that_cannot_reach_each_other_there_use_tcp() -> None:
    everyone = meet([None, None], Misleading())
    assert set(families(everyone).values()) == {FAR}
    say_hello_to_each_other(everyone)


class Overheard(HashStore):  # type: ignore[misc]
    """A store whose reader is overtaken by strangers: they reach the address before a rank does."""

    strangers: tuple[socket.socket, ...] = ()

    def get(self, key: str) -> bytes:
        text = super().get(key)
        _, host, port, _, name = text.decode().split()
        by_name, by_port = socket.socket(NEAR), socket.socket(FAR)
        by_name.connect(f"\0pipeline_engine/{name}")
        by_port.connect((host, int(port)))
        for stranger in (by_name, by_port):
            stranger.sendall(b"x" * 36)  # as long as what a rank says
        self.strangers += (by_name, by_port)
        return text


def test_whoever_does_not_know_the_token_is_sent_away() -> None:
    store = Overheard()
    everyone = meet([None, None], store)
    assert len(store.strangers) == 2
    for stranger in store.strangers:
        stranger.settimeout(DEADLINE)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        stranger.close()
    say_hello_to_each_other(everyone)


def test_a_machine_has_the_same_name_for_all_its_processes() -> None:
    assert this_machine() == this_machine() != ""
