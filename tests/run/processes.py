"""Run a function in several real processes that share a gloo group on this machine.

The processes come from a fork server that has imported torch and nothing has run in it: as quick as a fork (a fresh
interpreter needs 1.5 s for torch), and safe whatever the test process has done before (autograd refuses to work in a
child of a process that has run a backward).
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch.distributed", "pipeline_engine.testing", "pytest", "hypothesis"])


class Crash(str):
    """What is known of a rank that returned nothing: its traceback, its exit code, or that it hung."""


def run_in_processes(function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call ``function(rank, *args)`` in ``num_ranks`` processes; torch.distributed is initialised in each.

    The function, the arguments and the results must be picklable.  No process ends before all have returned,
    unless the function ends its own.

    Returns:
        by rank, what the function returned, or a ``Crash``.
    """
    port = _free_port()
    ranks = [_start(rank, num_ranks, port, timeout, (function, args)) for rank in range(num_ranks)]
    results: list[Any] = [Crash(f"rank {rank} did not end within {timeout} seconds") for rank in range(num_ranks)]
    try:
        _collect(ranks, results, monotonic() + timeout)
        for _, pipe in ranks:
            _tell_to_end(pipe)
    finally:
        for process, pipe in ranks:
            process.join(1)
            process.kill()
            process.join()
            pipe.close()
    return results


def _start(rank: int, num_ranks: int, port: int, timeout: float, work: Any) -> tuple[BaseProcess, Connection]:
    here, there = _SERVER.Pipe()
    arguments = (rank, num_ranks, port, timeout, pickle.dumps(work), there)
    process = _SERVER.Process(target=_live, args=arguments, daemon=True)
    process.start()
    there.close()
    return process, here


def _collect(ranks: list[tuple[BaseProcess, Connection]], results: list[Any], until: float) -> None:
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    while waiting and (ready := wait(list(waiting), max(until - monotonic(), 0))):
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                results[rank] = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                ranks[rank][0].join(1)
                results[rank] = Crash(f"rank {rank} ended with exit code {ranks[rank][0].exitcode}")


def _tell_to_end(pipe: Connection) -> None:
    try:
        pipe.send_bytes(b"end")
    except OSError:
        return  # it has ended


def _live(rank: int, num_ranks: int, port: int, timeout: float, work: bytes, pipe: Connection) -> None:
    """The life of one process."""
    faulthandler.dump_traceback_later(max(timeout - 1, 0.5))
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    pipe.send_bytes(_result(rank, num_ranks, timeout, work))
    try:
        pipe.recv_bytes()
    finally:
        os._exit(0)  # an interpreter with gloo threads needs up to 0.3 s to end


def _result(rank: int, num_ranks: int, timeout: float, work: bytes) -> bytes:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout))
        function, args = pickle.loads(work)
        return pickle.dumps(function(rank, *args))
    except BaseException:
        return pickle.dumps(Crash(traceback.format_exc()))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
