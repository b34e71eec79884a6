"""The conformance suite: what every transport must do, as functions that any transport can be held to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

from pipeline_engine.errors import DeadlineError, PeerFailedError, TransportError
from pipeline_engine.plan.values import Channel
from pipeline_engine.run.transports.base import Failure, Message, Transport

_DEADLINE = 20.0


class RunRanks(Protocol):
    """Calls ``function(transport)`` on every rank of a new pipeline; ``function`` is picklable.

    Raises what a rank raised; returns what they returned, by rank.
    """

    def __call__(self, function: Callable[[Transport], object], num_ranks: int) -> list[object]: ...


def check_transport(run: RunRanks) -> None:
    """Hold a transport to everything that ``Transport`` promises; each check is also usable alone (``CHECKS``).

    Args:
        run: ``run(function, num_ranks)`` calls ``function(transport)`` on every rank of a new pipeline, and raises
            what a rank raised.
    """
    for check, num_ranks in CHECKS.items():
        run(check, num_ranks)


_X, _Y, _BACK = Channel(0, 1, "x0"), Channel(0, 1, "y"), Channel(1, 0, "dx1")


def _bytes(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def _all_pairs(num_ranks: int) -> list[Channel]:
    ranks = range(num_ranks)
    pairs = [Channel(source, target, "x0") for source in ranks for target in ranks if source != target]
    return [*pairs, _Y, _BACK] if num_ranks > 1 else pairs


def _open(transport: Transport) -> None:
    transport.open(_all_pairs(transport.num_ranks), deadline=_DEADLINE)


def _check_a_ring_works(transport: Transport) -> None:
    """Every rank sends its number to the next one."""
    rank, num_ranks = transport.rank, transport.num_ranks
    before, after = (rank - 1) % num_ranks, (rank + 1) % num_ranks
    received = transport.receive(Channel(before, rank, "x0"), 1)
    sent = transport.send(Channel(rank, after, "x0"), _bytes(rank))
    transport.wait(received, deadline=_DEADLINE)
    transport.wait(sent, deadline=_DEADLINE)
    assert list(received.buffer) == [before]


def _raised(error: type[Exception], call: Callable[[], object]) -> Exception:
    try:
        call()
    except error as raised:
        return raised
    raise AssertionError(f"{error.__name__} was not raised.")


def check_messages_of_a_channel_keep_their_order(transport: Transport) -> None:
    """Whether they are given as tensors or as bytes."""
    _open(transport)
    if transport.rank == 0:
        handles = [
            transport.send(_X, _bytes(number, number) if number % 3 else bytes([number, number]))
            for number in range(50)
        ]
    else:
        handles = [transport.receive(_X, 2) for _ in range(50)]
    for number, handle in enumerate(handles):
        transport.wait(handle, deadline=_DEADLINE)
        assert list(handle.buffer) == [number, number]


def check_channels_of_a_pair_are_independent(transport: Transport) -> None:
    _open(transport)
    if transport.rank == 0:
        for handle in [transport.send(_X, _bytes(1)), transport.send(_Y, _bytes(2))]:
            transport.wait(handle, deadline=_DEADLINE)
    else:
        for channel, expected in [(_Y, [2]), (_X, [1])]:
            handle = transport.receive(channel, 1)
            transport.wait(handle, deadline=_DEADLINE)
            assert list(handle.buffer) == expected


def check_a_short_message_fills_the_head_of_a_receive(transport: Transport) -> None:
    _open(transport)
    handle = transport.send(_X, _bytes(7, 8)) if transport.rank == 0 else transport.receive(_X, 1000)
    transport.wait(handle, deadline=_DEADLINE)
    assert list(handle.buffer[:2]) == [7, 8]


def check_small_and_large_messages_share_a_channel(transport: Transport) -> None:
    """Whoever sends tells how much room the other end makes, whatever the message itself needs."""
    _open(transport)
    rooms = [8, 1 << 20, 8, 1 << 20]
    if transport.rank == 0:
        given: list[Message] = [_bytes(0), _bytes(1), bytes([2]), bytes([3])]
        handles = [transport.send(_X, message, room=room) for message, room in zip(given, rooms, strict=True)]
    else:
        handles = [transport.receive(_X, room) for room in rooms]
    for number, handle in enumerate(handles):
        transport.wait(handle, deadline=_DEADLINE)
        assert handle.buffer[0] == number


def check_small_messages_may_pile_up(transport: Transport) -> None:
    """More than any buffer of the system takes, before the other end looks at the first."""
    _open(transport)
    number = 2000
    if transport.rank == 0:
        handles = [transport.send(_X, torch.full((16_000,), n % 251, dtype=torch.uint8)) for n in range(number)]
        transport.exchange(b"sent", deadline=_DEADLINE)
    else:
        transport.exchange(b"sent", deadline=_DEADLINE)
        handles = [transport.receive(_X, 16_000) for _ in range(number)]
    for n, handle in enumerate(handles):
        transport.wait(handle, deadline=_DEADLINE)
        assert handle.buffer[0] == n % 251 and len(handle.buffer) == 16_000


def check_both_ends_may_send_before_they_wait(transport: Transport) -> None:
    _open(transport)
    there, back = (_X, _BACK) if transport.rank == 0 else (_BACK, _X)
    handles = [
        transport.send(there, torch.full((1 << 20,), transport.rank, dtype=torch.uint8)),
        transport.receive(back, 1 << 20),
    ]
    for handle in handles:
        transport.wait(handle, deadline=_DEADLINE)
    arrived = handles[1].buffer
    assert len(arrived) == 1 << 20 and arrived[0] == arrived[-1] == 1 - transport.rank


def check_a_large_send_without_receive_ends_at_its_deadline(transport: Transport) -> None:
    """Large, since a transport may take small messages off the sender's hands."""
    _open(transport)
    if transport.rank == 0:
        handle = transport.send(_X, torch.zeros(1 << 20, dtype=torch.uint8))
        late = str(_raised(DeadlineError, lambda: transport.wait(handle, deadline=0.2)))
        assert "x0:0>1" in late and "rank 1" in late and "0.2" in late, late
    transport.settle(deadline=_DEADLINE)
    _check_a_ring_works(transport)


def check_an_exchange_gives_every_word_to_everyone(transport: Transport) -> None:
    for turn in range(20):
        words = transport.exchange(b"%d says %d" % (transport.rank, turn), deadline=_DEADLINE)
        assert words == [b"%d says %d" % (rank, turn) for rank in range(transport.num_ranks)]


def check_an_exchange_names_who_did_not_take_part(transport: Transport) -> None:
    if transport.rank == 0:
        late = str(_raised(DeadlineError, lambda: transport.exchange(b"", deadline=0.1)))
        assert "rank 1" in late and "rank 2" in late and "rank 0" not in late, late
    transport.settle(deadline=_DEADLINE)
    check_an_exchange_gives_every_word_to_everyone(transport)


def check_fail_wakes_blocked_receives(transport: Transport) -> None:
    """Rank 0 fails, the others wait for each other; and again, for the failure must be forgotten."""
    with suppress(PeerFailedError):  # rank 0 may fail while this rank still hears that all are open
        _open(transport)
    for turn in range(5):
        _fail_or_wait(transport, turn)
        transport.settle(deadline=_DEADLINE)
        _check_a_ring_works(transport)
        with suppress(PeerFailedError):  # rank 0 may have heard everyone and fail while this rank still listens
            transport.exchange(b"", deadline=_DEADLINE)


def _fail_or_wait(transport: Transport, turn: int) -> None:
    failure = Failure(0, f"0F{turn}", "ValueError: boom", "a traceback")
    if transport.rank == 0:
        transport.fail(failure)
    else:
        peer = turn % transport.num_ranks if turn % transport.num_ranks != transport.rank else 0
        handle = transport.receive(Channel(peer, transport.rank, "x0"), 8)
        told = _raised(PeerFailedError, lambda: transport.wait(handle, deadline=_DEADLINE))
        assert isinstance(told, PeerFailedError) and told.doing == failure.doing, told
    assert transport.failure() == failure


def check_fail_wakes_a_receive_and_a_send_on_one_pair(transport: Transport) -> None:
    """Two ranks wait for each other on two channels of one pair; only a third one can tell them."""
    _open(transport)
    if transport.rank == 2:
        transport.fail(Failure(2, "2F0", "ValueError: boom", ""))
    else:
        large = torch.zeros(1 << 20, dtype=torch.uint8)
        handle = transport.send(_X, large) if transport.rank == 0 else transport.receive(_Y, 1 << 20)
        _raised(PeerFailedError, lambda: transport.wait(handle, deadline=_DEADLINE))
    transport.settle(deadline=_DEADLINE)
    _check_a_ring_works(transport)


def check_fail_wakes_a_blocked_exchange(transport: Transport) -> None:
    if transport.rank == 1:
        transport.fail(Failure(1, "1F0", "ValueError: boom", ""))
    else:
        _raised(PeerFailedError, lambda: transport.exchange(b"", deadline=_DEADLINE))
    transport.settle(deadline=_DEADLINE)
    check_an_exchange_gives_every_word_to_everyone(transport)


def check_of_several_failures_everyone_knows_the_same(transport: Transport) -> None:
    known = []
    for turn in range(5):
        transport.fail(Failure(transport.rank, f"action {turn}", "ValueError: boom", ""))
        known.append(transport.failure())
        transport.settle(deadline=_DEADLINE)
    assert [failure and failure.doing for failure in known] == [f"action {turn}" for turn in range(5)]
    assert len(set(transport.exchange(repr(known).encode(), deadline=_DEADLINE))) == 1


def check_settle_empties_channels_that_are_out_of_step(transport: Transport) -> None:
    """As after an early leave: nobody failed, but one has sent and the other one posted too much."""
    _open(transport)
    if transport.rank == 0:
        for size in (1, 100_000, 3):
            transport.send(_X, torch.zeros(size, dtype=torch.uint8))
    else:
        for _ in range(4):
            transport.receive(_Y, 10)
    transport.settle(deadline=_DEADLINE)
    _check_a_ring_works(transport)


def check_a_rank_that_leaves_ends_the_waits_for_it(transport: Transport) -> None:
    _open(transport)
    if transport.rank == 1:
        transport.close()
        return
    handle = transport.receive(_BACK, 1)
    told = _raised(PeerFailedError, lambda: transport.wait(handle, deadline=_DEADLINE))
    assert isinstance(told, PeerFailedError) and told.rank == 1 and "closed" in told.cause, told
    _raised(PeerFailedError, lambda: transport.exchange(b"", deadline=_DEADLINE))


def check_close_may_be_called_twice(transport: Transport) -> None:
    _open(transport)
    _check_a_ring_works(transport)
    transport.exchange(b"", deadline=_DEADLINE)
    transport.close()
    transport.close()
    told = str(_raised(TransportError, lambda: transport.exchange(b"", deadline=_DEADLINE)))
    assert f"rank {transport.rank} has closed its transport" in told, told


CHECKS: dict[Callable[[Transport], None], int] = {
    check_messages_of_a_channel_keep_their_order: 2,
    check_channels_of_a_pair_are_independent: 2,
    check_a_short_message_fills_the_head_of_a_receive: 2,
    check_both_ends_may_send_before_they_wait: 2,
    check_small_and_large_messages_share_a_channel: 2,
    check_small_messages_may_pile_up: 2,
    check_a_large_send_without_receive_ends_at_its_deadline: 2,
    check_an_exchange_gives_every_word_to_everyone: 3,
    check_an_exchange_names_who_did_not_take_part: 3,
    check_fail_wakes_blocked_receives: 3,
    check_fail_wakes_a_receive_and_a_send_on_one_pair: 3,
    check_fail_wakes_a_blocked_exchange: 3,
    check_of_several_failures_everyone_knows_the_same: 3,
    check_settle_empties_channels_that_are_out_of_step: 2,
    check_a_rank_that_leaves_ends_the_waits_for_it: 2,
    check_close_may_be_called_twice: 2,
}
