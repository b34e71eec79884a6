"""Both transports keep the promises of ``Transport``; what only one of them could do wrong is tested after that."""

from __future__ import annotations

import os
import random
import signal
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline_engine.errors import DeadlineError, PeerFailedError, TransportError, UsageError
from pipeline_engine.plan.values import Channel
from pipeline_engine.run.transports.base import Failure, Handle, Transport
from pipeline_engine.run.transports.torch_distributed import TorchTransport
from pipeline_engine.testing import CHECKS, check_transport, run_ranks_in_threads
from tests.run.processes import Crash, run_in_processes

DEADLINE = 20.0
SOON = 5.0  # seconds; far less than DEADLINE, far more than waking takes on a busy machine
X, Y, BACK = Channel(0, 1, "x0"), Channel(0, 1, "y"), Channel(1, 0, "x0")
BOOM = Failure(0, "0F3", "ValueError: boom", "a traceback")


def bytes_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def all_pairs(num_ranks: int) -> list[Channel]:
    return [Channel(a, b, "x0") for a in range(num_ranks) for b in range(num_ranks) if a != b]


def told(call: Callable[[], object]) -> PeerFailedError:
    with pytest.raises(PeerFailedError) as raised:
        call()
    return raised.value


def wait_for(transport: Transport, peer: int) -> None:
    """Block in a receive from ``peer``."""
    transport.wait(transport.receive(Channel(peer, transport.rank, "x0"), 8), deadline=DEADLINE)


def ring(transport: Transport) -> None:
    rank, num_ranks = transport.rank, transport.num_ranks
    received = transport.receive(Channel((rank - 1) % num_ranks, rank, "x0"), 1)
    sent = transport.send(Channel(rank, (rank + 1) % num_ranks, "x0"), bytes_of(rank))
    for handle in (received, sent):
        transport.wait(handle, deadline=DEADLINE)
    assert list(received.buffer) == [(rank - 1) % num_ranks]


# Promises of every transport.


def with_torch_transport(rank: int, function: Callable[[Transport], Any]) -> Any:
    transport = TorchTransport()
    try:
        return function(transport)
    finally:
        transport.close()


def run_over_gloo(function: Callable[[Transport], Any], num_ranks: int) -> list[Any]:
    return all_returned(run_in_processes(with_torch_transport, num_ranks, function))


def all_returned(results: list[Any]) -> list[Any]:
    assert not any(isinstance(result, Crash) for result in results), "\n".join(map(str, results))
    return results


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


# Gloo: a rank that dies, is stopped, or is interrupted.


def die(rank: int, victim: int) -> list[Any]:
    """Half of the ranks block in gloo, the other half in an exchange, when ``victim`` is killed."""
    transport = TorchTransport()
    transport.open(all_pairs(transport.num_ranks), deadline=DEADLINE)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    start = monotonic()
    if rank % 2:
        error = told(lambda: wait_for(transport, 4 - rank))
    else:
        error = told(lambda: transport.exchange(b"", deadline=DEADLINE))
    seconds = monotonic() - start
    again = told(lambda: transport.settle(deadline=DEADLINE))
    transport.close()
    return [error.rank, str(error), again.rank, seconds]


@pytest.mark.parametrize("victim", [2, 0])
def test_a_killed_rank_is_named_by_all_others_even_if_it_hosts_the_store(victim: int) -> None:
    results = run_in_processes(die, 4, victim)
    assert results.pop(victim) == f"rank {victim} ended with exit code -9"
    for named, text, named_again, seconds in all_returned(results):
        assert named == named_again == victim and seconds < SOON
        assert text == f"rank {victim} failed while it performed an unknown action: its connection was lost"


def stop(rank: int) -> float:
    """Rank 2 is stopped and cannot answer; rank 1 waits for it when rank 0 fails."""
    transport = TorchTransport()
    transport.open(all_pairs(3), deadline=DEADLINE)
    pids = [int(word) for word in transport.exchange(b"%d" % os.getpid(), deadline=DEADLINE)]
    start = monotonic()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 1:
        assert told(lambda: wait_for(transport, 2)).doing == BOOM.doing
        os.kill(pids[2], signal.SIGCONT)
    else:
        while Path(f"/proc/{pids[2]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            os.sched_yield()
        transport.fail(BOOM)
    seconds = monotonic() - start
    transport.settle(deadline=DEADLINE)
    ring(transport)
    transport.exchange(b"", deadline=DEADLINE)
    transport.close()
    return seconds


def test_a_wait_for_a_stopped_rank_is_ended_by_force_and_the_links_are_built_again() -> None:
    assert all_returned(run_in_processes(stop, 3))[1] < SOON


def interrupt(rank: int) -> str:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    transport = TorchTransport()
    transport.open([X, BACK], deadline=DEADLINE)
    try:
        pids = transport.exchange(b"%d" % os.getpid(), deadline=DEADLINE)
        if rank == 1:
            os.kill(int(pids[0]), signal.SIGINT)
        wait_for(transport, 1 - rank)
    except (KeyboardInterrupt, PeerFailedError) as error:
        transport.fail(Failure(rank, "a wait", repr(error), ""))  # in case that Ctrl-C came before the wait
        result = repr(error)
    transport.settle(deadline=DEADLINE)
    ring(transport)
    transport.exchange(b"", deadline=DEADLINE)
    transport.close()
    return result


def test_ctrl_c_ends_a_wait_in_gloo_and_tells_the_others() -> None:
    start = monotonic()
    interrupted, other = all_returned(run_in_processes(interrupt, 2))
    assert interrupted == "KeyboardInterrupt()" and "rank 0" in other and "KeyboardInterrupt" in other
    assert monotonic() - start < DEADLINE


def die_as_a_parent(rank: int) -> str:
    """Rank 1 forks a child, as a data loader does, and is killed; the child lives on."""
    transport = TorchTransport()
    transport.open([X, BACK], deadline=DEADLINE)
    child = 0
    if rank == 1 and (child := os.fork()) == 0:
        signal.pause()
    orphan = int(transport.exchange(b"%d" % child, deadline=DEADLINE)[1])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        return str(told(lambda: wait_for(transport, 1)))
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_child_process_does_not_hide_the_death_of_its_parent() -> None:
    assert "rank 1" in all_returned(run_in_processes(die_as_a_parent, 2)[:1])[0]


# Gloo: what is left behind, and living side by side.


def resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def break_and_settle_again_and_again(rank: int) -> list[Any]:
    transport = TorchTransport()
    transport.open([X, Y, BACK], deadline=DEADLINE)
    kept, seen = [], []
    for _ in range(4):
        if rank == 0:
            with pytest.raises(DeadlineError) as raised:
                transport.wait(transport.receive(BACK, 1), deadline=0.05)
            kept.append(raised.value)  # its traceback must keep no connection alive
        transport.settle(deadline=DEADLINE)
        ring(transport)
        seen.append(resources())
    transport.exchange(b"", deadline=DEADLINE)
    transport.close()
    return seen


def test_links_that_are_built_again_leave_nothing_behind() -> None:
    for seen in all_returned(run_in_processes(break_and_settle_again_and_again, 2)):
        assert len(set(seen)) == 1, seen


def count_keys(rank: int) -> list[int]:
    store = dist.distributed_c10d._get_default_store()
    transport = TorchTransport()
    transport.open(all_pairs(2), deadline=DEADLINE)
    counts = []
    for turn in range(10):
        transport.fail(Failure(rank, f"action {turn}", "ValueError: boom", ""))
        transport.settle(deadline=DEADLINE)
        transport.settle(deadline=DEADLINE)  # now the key of the first one is gone
        counts.append(store.num_keys())
    transport.close()
    return counts


def test_the_store_does_not_grow_with_use() -> None:
    for counts in all_returned(run_in_processes(count_keys, 2)):
        assert counts[-1] <= counts[0], counts


def side_by_side(rank: int) -> Any:
    pair = dist.new_group([1, 2])
    everyone, again = TorchTransport(), TorchTransport()
    for transport in (again, everyone):
        transport.open(all_pairs(3), deadline=DEADLINE)
    if rank == 0:
        with pytest.raises(UsageError, match="not in the process group"):
            TorchTransport(pair)
        everyone.fail(BOOM)
    else:
        inner = TorchTransport(pair)
        inner.open(all_pairs(2), deadline=DEADLINE)
        ring(inner)
        assert inner.rank == rank - 1 and inner.failure() is None
        told(lambda: everyone.exchange(b"", deadline=DEADLINE))
        inner.exchange(b"", deadline=DEADLINE)
        inner.close()
    ring(again)
    assert again.failure() is None
    assert everyone.failure() == BOOM
    again.exchange(b"", deadline=DEADLINE)
    for transport in (again, everyone):
        transport.close()


def test_several_transports_live_side_by_side_over_one_group_and_over_parts_of_it() -> None:
    all_returned(run_in_processes(side_by_side, 3))


def with_a_file_store(rank: int, path: str) -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    transport = TorchTransport()
    transport.open([X, BACK], deadline=DEADLINE)
    if rank == 0:
        transport.fail(BOOM)
    else:
        assert told(lambda: wait_for(transport, 0)).doing == BOOM.doing
    transport.settle(deadline=DEADLINE)
    ring(transport)
    transport.exchange(b"", deadline=DEADLINE)
    transport.close()


def test_a_file_store_will_do(tmp_path: Any) -> None:
    all_returned(run_in_processes(with_a_file_store, 2, str(tmp_path / "store")))


def only_rank_0_comes(rank: int) -> str:
    if rank == 1:
        return ""
    with pytest.raises(TransportError) as raised:
        TorchTransport(timeout=0.2)
    return str(raised.value)


def test_a_rank_that_makes_no_transport_is_named() -> None:
    assert "ranks [1] did not come within 0.2 seconds" in all_returned(run_in_processes(only_rank_0_comes, 2))[0]


def test_a_transport_needs_torch_distributed() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        TorchTransport()


def other_backend(rank: int) -> str:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers a backend that is not gloo

    group = dist.new_group(backend="fake")
    with pytest.raises(UsageError) as raised:
        TorchTransport(group)
    return str(raised.value)


def test_a_group_that_is_not_gloo_is_refused_with_the_cure() -> None:
    (text,) = all_returned(run_in_processes(other_backend, 1))
    assert "gloo only" in text and "new_group(backend='gloo')" in text
