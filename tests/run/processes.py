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
    world = World(num_ranks, timeout=timeout)
    try:
        return world.run(function, *args)
    finally:
        world.end()


class World:
    """Processes that share a gloo group and stay, to run one function after another.

    Args:
        num_ranks: how many.
        timeout: seconds for each function.
    """

    def __init__(self, num_ranks: int, *, timeout: float) -> None:
        port = _free_port()
        self._timeout = timeout
        self._ranks = [_start(rank, num_ranks, port, timeout) for rank in range(num_ranks)]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(rank, *args)`` on every rank; by rank, what it returned, or a ``Crash``.

        After a ``Crash`` there is nothing left to do but ``end``.
        """
        until = monotonic() + self._timeout
        work = pickle.dumps((function, args))
        for _, pipe in self._ranks:
            _tell(pipe, work)
        return self._collect(until)

    def end(self) -> None:
        """End all processes."""
        for _, pipe in self._ranks:
            _tell(pipe, b"end")
        for process, pipe in self._ranks:
            process.join(1)
            process.kill()
            process.join()
            pipe.close()

    def _collect(self, until: float) -> list[Any]:
        results: list[Any] = [
            Crash(f"rank {rank} did not end within {self._timeout} seconds") for rank in range(len(self._ranks))
        ]
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        while waiting and (ready := wait(list(waiting), max(until - monotonic(), 0))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    results[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    process, _ = self._ranks[rank]
                    process.join(1)
                    results[rank] = Crash(f"rank {rank} ended with exit code {process.exitcode}")
        return results


def _start(rank: int, num_ranks: int, port: int, timeout: float) -> tuple[BaseProcess, Connection]:
    here, there = _SERVER.Pipe()
    process = _SERVER.Process(target=_live, args=(rank, num_ranks, port, timeout, there), daemon=True)
    process.start()
    there.close()
    return process, here


def _tell(pipe: Connection, word: bytes) -> None:
    try:
        pipe.send_bytes(word)
    except OSError:
        return  # it has ended


def _live(rank: int, num_ranks: int, port: int, timeout: float, pipe: Connection) -> None:
    """The life of one process."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        while (work := pipe.recv_bytes()) != b"end":
            faulthandler.dump_traceback_later(max(timeout - 1, 0.5))
            pipe.send_bytes(_result(rank, num_ranks, timeout, work))
            faulthandler.cancel_dump_traceback_later()
    finally:
        os._exit(0)  # an interpreter with gloo threads needs up to 0.3 s to end


def _result(rank: int, num_ranks: int, timeout: float, work: bytes) -> bytes:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if not dist.is_initialized():
            dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout))
        function, args = pickle.loads(work)
        return pickle.dumps(function(rank, *args))
    except BaseException:
        return pickle.dumps(Crash(traceback.format_exc()))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
