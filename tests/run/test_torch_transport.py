"""A transport over a process group: how a rank ends or is interrupted, what is left behind, which groups will do."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch.distributed as dist

from pipeline_engine.errors import DeadlineError, PeerFailedError, TransportError, UsageError
from pipeline_engine.run.transports.base import Failure
from pipeline_engine.run.transports.torch_distributed import TorchTransport
from tests.run.moving import BACK, BOOM, DEADLINE, SOON, X, Y, all_pairs, all_returned, ring, told, wait_for
from tests.run.processes import run_in_processes


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


# What is left behind, and living side by side.


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
