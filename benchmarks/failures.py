"""From a fault on one rank to the moment when the last of the others raises, over gloo processes.

    python -m benchmarks.failures --json figures.json

See failures.md for what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import monotonic  # one clock for all processes of a machine
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pipeline_engine as pe
from art_adapter.progress import say, with_bar
from benchmarks.sleeping import nap
from pipeline_engine.launch import HOST, run_ranks

WIDTH, ROWS, COUNT, AT = 64, 32, 8, 3
SECONDS_OF_WORK = 0.005
FAULTS = ("forward", "backward", "left the loop")


class Fault(Exception):
    """What a rank raises."""


class Stage(nn.Module):
    """Naps for ``SECONDS_OF_WORK``; has a fate at microbatch ``AT``, in its forward or its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) / 2)
        self.fates: dict[str, Callable[[], None]] = {}

    def forward(self, hidden: torch.Tensor, *, number: int) -> torch.Tensor:
        nap(SECONDS_OF_WORK)
        output = hidden @ self.weight
        if number == AT and "forward" in self.fates:
            self.fates["forward"]()
        if number == AT and "backward" in self.fates:
            output.register_hook(lambda _: self.fates["backward"]())
        return output


def build(rank: int, ranks: int) -> tuple[pe.Pipeline, Stage]:
    stage = Stage()
    graph = pe.StageGraph.chain(ranks, ranks)
    return pe.Pipeline({rank: stage}, graph=graph, schedule="1f1b", transport=pe.TorchTransport()), stage


def train(pipeline: pe.Pipeline, on_leave: Callable[[], None] | None = None) -> None:
    """A plain pass; with ``on_leave`` the caller leaves the loop at microbatch ``AT`` and goes into his next call."""
    data = [pe.Microbatch((torch.ones(ROWS, WIDTH),), {"number": number}) for number in range(COUNT)]
    for item in pipeline.stream(data):
        if item.index == AT and on_leave is not None:
            on_leave()
            break
        item.outputs.square().sum().backward()
    pipeline.flush()


def mark(moments: list[float]) -> None:
    moments.append(monotonic())


def break_down(moments: list[float]) -> None:
    mark(moments)
    raise Fault


def suffer(rank: int, ranks: int, fault: str, repeats: int) -> list[tuple[float, float, float]]:
    """For each repeat: when this rank broke (0 if it did not), when it raised, and when it could go on."""
    pipeline, stage = build(rank, ranks)
    moments = []
    with pipeline:
        train(pipeline)
        for repeat in range(repeats):
            broke: list[float] = []
            is_victim, leaves = rank == repeat % ranks, fault == "left the loop"
            stage.fates = {fault: partial(break_down, broke)} if is_victim and not leaves else {}
            try:
                train(pipeline, partial(mark, broke) if is_victim and leaves else None)
            except (Fault, pe.PeerFailedError, pe.UsageError):
                raised = monotonic()
            stage.fates = {}
            pipeline.flush()
            moments.append((sum(broke), raised, monotonic()))
            train(pipeline)
    return moments


def measured(ranks: int, fault: str, repeats: int) -> dict[str, Any]:
    """Seconds from the fault to the last raise, and from there until all can go on."""
    by_rank = run_ranks(suffer, ranks, ranks, fault, repeats, timeout=300)
    waits, recoveries = [], []
    for turn in zip(*by_rank, strict=True):
        broke, raised = max(each[0] for each in turn), max(each[1] for each in turn)
        waits.append(raised - broke)
        recoveries.append(max(each[2] for each in turn) - raised)
    return {"ranks": ranks, "fault": fault, "seconds": waits, "recovery": recoveries}


# Deaths: a process each time.


def killed(ranks: int, repeats: int) -> dict[str, Any]:
    waits = []
    for repeat in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
            command = [sys.executable, "-m", "benchmarks.failures", "--rank"]
            rest = [str(ranks), str(repeat % ranks), str(store.port), folder]
            processes = [subprocess.Popen([*command, str(rank), *rest]) for rank in range(ranks)]
            for process in processes:
                process.wait(120)
            moments = {int(each.stem): float(each.read_text()) for each in Path(folder).iterdir()}
            died = moments.pop(repeat % ranks)
            assert len(moments) == ranks - 1, "a rank did not raise"
            waits.append(max(moments.values()) - died)
    return {"ranks": ranks, "fault": "killed", "seconds": waits, "recovery": []}


def live(rank: int, ranks: int, victim: int, port: int, folder: str) -> None:
    """One rank of ``killed``: writes down when it died, or when it raised."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore(HOST, port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=100))
    pipeline, stage = build(rank, ranks)
    train(pipeline)

    def die() -> None:
        Path(folder, str(rank)).write_text(str(monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    stage.fates = {"forward": die} if rank == victim else {}
    try:
        train(pipeline)
    except pe.PeerFailedError as error:
        assert error.rank == victim
        Path(folder, str(rank)).write_text(str(monotonic()))
    os._exit(0)


def row(figures: dict[str, Any]) -> str:
    seconds, recovery = figures["seconds"], figures["recovery"]
    back = f"{statistics.median(recovery) * 1e3:.0f} ({max(recovery) * 1e3:.0f})" if recovery else "never"
    middle, late, most = statistics.median(seconds), percentile(seconds, 95), max(seconds)
    return (
        f"| {figures['ranks']} | {figures['fault']} | {len(seconds)} | {middle * 1e3:.0f} | {late * 1e3:.0f} | "
        f"{most * 1e3:.0f} | {back} |"
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that is at least as large as so many per cent of all."""
    return sorted(values)[-(-len(values) * percent // 100) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 and 4 ranks, few repeats: within 90 seconds")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--deaths", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        *numbers, folder = given.rank
        live(*map(int, numbers), folder=folder)
        return
    if given.quick:
        given.ranks, given.repeats, given.deaths = [2, 4], 10, 3
    print("| ranks | fault | repeats | median, ms | 95th percentile, ms | most, ms | usable again after, ms (most) |")
    print("|---|---|---|---|---|---|---|")
    figures = []
    for ranks in with_bar(given.ranks, "numbers of ranks"):
        for fault in FAULTS:
            figures.append(measured(ranks, fault, given.repeats))
            say(row(figures[-1]))
        if given.deaths:
            figures.append(killed(ranks, given.deaths))
            say(row(figures[-1]))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
