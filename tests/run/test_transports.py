"""Both transports keep the promises of ``Transport``; what ranks in threads could do wrong is tested after that."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipeline_engine.errors import PeerFailedError, TransportError
from pipeline_engine.plan.values import Channel
from pipeline_engine.run.transports.base import Failure, Handle, Transport
from pipeline_engine.run.transports.torch_distributed import TorchTransport
from pipeline_engine.testing import CHECKS, check_transport, run_ranks_in_threads
from tests.run.moving import BACK, BOOM, DEADLINE, X, Y, all_pairs, all_returned, bytes_of, wait_for
from tests.run.processes import run_in_processes


def with_torch_transport(rank: int, function: Callable[[Transport], Any]) -> Any:
    transport = TorchTransport()
    try:
        return function(transport)
    finally:
        transport.close()


def run_over_gloo(function: Callable[[Transport], Any], num_ranks: int) -> list[Any]:
    return all_returned(run_in_processes(with_torch_transport, num_ranks, function))


@pytest.mark.parametrize("run", [run_ranks_in_threads, run_over_gloo])
@pytest.mark.parametrize("check", CHECKS)
def test_a_transport_keeps_its_promises(run: Any, check: Callable[[Transport], None]) -> None:
    run(check, CHECKS[check])


def test_check_transport_performs_every_check() -> None:
    performed: dict[object, int] = {}
    check_transport(lambda function, num_ranks: performed.update({function: num_ranks}) or [])
    assert performed == CHECKS


def one_rank_alone(transport: Transport) -> None:
    transport.open([], deadline=DEADLINE)
    assert transport.exchange(b"alone", deadline=DEADLINE) == [b"alone"]
    transport.fail(BOOM)
    assert transport.failure() == BOOM
    transport.settle(deadline=DEADLINE)
    assert transport.failure() is None


def wrong_end(transport: Transport) -> None:
    transport.open([X], deadline=DEADLINE)
    with pytest.raises(TransportError, match=r"rank \d cannot \w+ on channel x0:0>1, which it did not open"):
        transport.receive(X, 1) if transport.rank == 0 else transport.send(X, bytes_of(1))
    with pytest.raises(TransportError, match="which it did not open"):
        transport.receive(BACK, 1) if transport.rank == 0 else transport.send(BACK, bytes_of(1))


def different_channels(transport: Transport) -> None:
    with pytest.raises(TransportError, match=r"rank \d opens channels \[.*\], rank \d opens"):
        transport.open([X] if transport.rank == 0 else [BACK], deadline=DEADLINE)


def handle_of_an_earlier_epoch(transport: Transport) -> None:
    transport.open([X], deadline=DEADLINE)
    handle = transport.send(X, bytes_of(1)) if transport.rank == 0 else None
    transport.settle(deadline=DEADLINE)
    if handle is None:
        return
    with pytest.raises(TransportError, match="x0:0>1 was not moved: it was posted before the last settle"):
        transport.wait(handle, deadline=DEADLINE)


@pytest.mark.parametrize("run", [run_ranks_in_threads, run_over_gloo])
@pytest.mark.parametrize(
    ("function", "num_ranks"),
    [(one_rank_alone, 1), (wrong_end, 2), (different_channels, 2), (handle_of_an_earlier_epoch, 2)],
)
def test_a_transport_works_alone_and_refuses_what_it_cannot_do(run: Any, function: Any, num_ranks: int) -> None:
    run(function, num_ranks)


def random_traffic(transport: Transport) -> None:
    """Ranks send along a random plan until one or two of them fail; then all settle, 30 times."""
    channels = [*all_pairs(3), Y]
    transport.open(channels, deadline=DEADLINE)
    for turn in range(30):
        plan = random.Random(turn)
        messages = [(plan.choice(channels), plan.choice([1, 16, 200_000])) for _ in range(40)]
        ends = {plan.randrange(3): plan.randrange(50) for _ in range(2)}
        try:
            follow(transport, messages, turn, ends.get(transport.rank, len(messages)))
            if transport.rank in ends:
                transport.fail(Failure(transport.rank, f"turn {turn}", "ValueError: boom", ""))
        except PeerFailedError as error:
            assert error.doing == f"turn {turn}"
        transport.settle(deadline=DEADLINE)


def follow(transport: Transport, messages: list[tuple[Channel, int]], turn: int, end: int) -> None:
    posted: deque[tuple[Handle, int]] = deque()
    for number, (channel, size) in enumerate(messages[:end]):
        content = (turn + number) % 251
        if channel.source == transport.rank:
            posted.append((transport.send(channel, torch.full((size,), content, dtype=torch.uint8)), content))
        elif channel.target == transport.rank:
            posted.append((transport.receive(channel, size), content))
        if len(posted) > number % 7:
            finish(transport, *posted.popleft())
    while posted and end == len(messages):
        finish(transport, *posted.popleft())


def finish(transport: Transport, handle: Handle, content: int) -> None:
    transport.wait(handle, deadline=DEADLINE)
    buffer = handle.buffer
    tensor = buffer if isinstance(buffer, torch.Tensor) else torch.frombuffer(buffer, dtype=torch.uint8)
    assert bool((tensor == content).all())


@pytest.mark.parametrize("run", [run_ranks_in_threads, run_over_gloo])
def test_after_any_failure_in_random_traffic_the_next_messages_arrive_whole(run: Any) -> None:
    run(random_traffic, 3)


# Memory.


def test_a_message_longer_than_its_receive_raises_on_both_sides() -> None:
    def too_long(transport: Transport) -> None:
        transport.open([X], deadline=DEADLINE)
        handle = transport.send(X, bytes_of(1, 2, 3)) if transport.rank == 0 else transport.receive(X, 2)
        with pytest.raises(TransportError, match="3 bytes were sent into a receive of 2 bytes"):
            transport.wait(handle, deadline=DEADLINE)

    run_ranks_in_threads(too_long, 2)


def test_bytes_are_read_when_the_receive_is_posted() -> None:
    def overwrite(transport: Transport) -> None:
        transport.open([X], deadline=DEADLINE)
        message = bytes_of(1)
        handle = transport.send(X, message) if transport.rank == 0 else None
        message.fill_(2)
        transport.exchange(b"", deadline=DEADLINE)
        handle = handle or transport.receive(X, 1)
        transport.wait(handle, deadline=DEADLINE)
        assert list(handle.buffer) == [2]

    run_ranks_in_threads(overwrite, 2)


def test_ranks_in_threads_raise_what_failed_and_not_what_followed() -> None:
    def fail_on_one(transport: Transport) -> None:
        transport.open([X, BACK], deadline=DEADLINE)
        if transport.rank == 1:
            raise ValueError("boom")
        wait_for(transport, 1)

    with pytest.raises(ValueError, match="boom"):
        run_ranks_in_threads(fail_on_one, 2)


def test_ranks_in_threads_that_hang_are_reported_with_their_stacks() -> None:
    def wait_for_each_other(transport: Transport) -> None:
        transport.open([X, BACK], deadline=DEADLINE)
        wait_for(transport, 1 - transport.rank)

    with pytest.raises(TimeoutError) as raised:
        run_ranks_in_threads(wait_for_each_other, 2, timeout=0.2)
    assert "rank 0:" in str(raised.value) and str(raised.value).count("in wait_for\n") == 2
