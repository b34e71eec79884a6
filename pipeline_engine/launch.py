"""One process per rank on this machine, joined by gloo over loopback."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

HOST = "127.0.0.1"
SECONDS_TO_EXIT = 5.0

_starter: Connection | None = None
"""In a rank's process: the way back to the one that started it."""


def run_ranks(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    timeout: float,
    on_news: Callable[[int, Any], object] = lambda rank, news: None,
) -> list[Any]:
    """Call ``function(rank, *arguments)`` in ``ranks`` new processes and return what each returned, by rank.

    Each process has one torch thread and a default process group on gloo.  Ctrl-C reaches the caller only, as
    KeyboardInterrupt, and ends all of them.

    Args:
        function: defined at the top level of a module; returns plain data.
        ranks: number of processes.
        arguments: passed on; they must pickle.
        timeout: seconds for all of it, the start of the processes included.
        on_news: called with a rank and what it told by ``tell``.

    Raises:
        RuntimeError: a rank raised or died; the others are killed.
        TimeoutError: time is up; all of them are killed.
    """
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    rank_behind: dict[Connection, int] = {}
    try:
        for rank in range(ranks):
            receiving, sending = context.Pipe(duplex=False)
            work = (sending, store.port, ranks, rank, function, arguments)
            processes.append(context.Process(target=_serve, args=work, daemon=True))
            with _deaf_to_interrupts():
                processes[-1].start()
            sending.close()
            rank_behind[receiving] = rank
        results = _collect(rank_behind, time.monotonic() + timeout, on_news)
        for process in processes:
            process.join(SECONDS_TO_EXIT)
        return [results[rank] for rank in range(ranks)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def tell(news: Any) -> None:
    """Send plain data to whoever called ``run_ranks``, for its ``on_news``; elsewhere than in a rank, nothing.

    Args:
        news: must pickle.
    """
    if _starter is not None:
        _starter.send(("news", news))


def _collect(
    rank_behind: dict[Connection, int], deadline: float, on_news: Callable[[int, Any], object]
) -> dict[int, Any]:
    results: dict[int, Any] = {}
    while rank_behind:
        ready = wait(list(rank_behind), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"Time is up and nothing came from ranks {sorted(rank_behind.values())}.")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = rank_behind[connection]
            try:
                word, value = connection.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died without a word") from None
            if word == "news":
                on_news(rank, value)
                continue
            del rank_behind[connection]
            if word == "raised":
                raise RuntimeError(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return results


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes that are started here do not hear Ctrl-C; only a main thread can arrange that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(
    answer: Connection, port: int, ranks: int, rank: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    global _starter
    _starter = answer
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    try:
        store = TCPStore(HOST, port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        answer.send(("returned", function(rank, *arguments)))
        dist.destroy_process_group()
    except Exception:
        answer.send(("raised", traceback.format_exc()))
