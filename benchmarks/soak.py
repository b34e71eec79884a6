"""A pipeline in long use: random shapes, exceptions, breaks, skips and passes without gradients, mixed.

    python -m benchmarks.soak --json figures.json

At the end nothing may have grown: memory, threads, file descriptors.  See soak.md for what the figures mean.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from attrs import asdict, frozen
from torch import nn

import pipeline_engine as pe
from art_adapter.progress import with_bar
from benchmarks.record import Record
from benchmarks.tables import markdown
from pipeline_engine.launch import run_ranks
from pipeline_engine.run.transports.base import Transport

WIDTH = 16
MOST_ROWS = 600  # enough for messages of two parts
SAMPLES = 10


class Trouble(Exception):
    """What a stage or a caller raises now and then."""


class Stage(nn.Module):
    """Raises in the forward of a microbatch if it is told to."""

    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / 4)

    def forward(self, hidden: torch.Tensor, *, breaks: bool) -> torch.Tensor:
        if breaks:
            raise Trouble("in a stage")
        return torch.tanh(hidden @ self.weight)


@frozen
class Sample:
    """What one rank holds after so many microbatches: resident memory in MiB, threads, file descriptors."""

    microbatches: int
    resident: float
    threads: int
    descriptors: int


def sample(microbatches: int) -> Sample:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return Sample(microbatches, resident, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))


@frozen
class Pass:
    """One call and what the caller does in it; drawn the same on all ranks."""

    kind: str
    rows: tuple[int, ...]
    at: int
    rank: int


KINDS = ["stream"] * 6 + ["forward", "step", "no_grad", "break", "skip", "stage", "caller", "invalidate"]


def passes(microbatches: int, num_ranks: int, seed: int) -> Iterator[Pass]:
    """Until so many microbatches have been had."""
    drawn = random.Random(seed)
    while microbatches > 0:
        rows = tuple(int(MOST_ROWS * drawn.random() ** 6) for _ in range(drawn.randint(1, 9)))
        yield Pass(drawn.choice(KINDS), rows, drawn.randrange(len(rows)), drawn.randrange(num_ranks))
        microbatches -= len(rows)


def soak(transport: Transport, microbatches: int, *, schedule: str = "1f1b", seed: int = 0) -> list[Sample]:
    """Use one pipeline for so many microbatches; what this rank held at regular intervals, the first after a tenth."""
    graph = pe.StageGraph.chain(transport.num_ranks, transport.num_ranks)
    stage = Stage(transport.rank)
    samples: list[Sample] = []
    pipeline = pe.Pipeline({transport.rank: stage}, graph=graph, schedule=schedule, transport=transport, deadline=60.0)
    with pipeline:
        done = 0
        for each in passes(microbatches, transport.num_ranks, seed):
            _perform(pipeline, transport.rank, each)
            stage.zero_grad()
            done += len(each.rows)
            if done * SAMPLES >= microbatches * (len(samples) + 1):
                samples.append(sample(done))
    return samples


def _perform(pipeline: pe.Pipeline, rank: int, each: Pass) -> None:
    try:
        _call(pipeline, rank, each)
        pipeline.flush()
    except (Trouble, pe.PeerFailedError, pe.UsageError):
        if each.kind not in ("stage", "caller"):
            raise
        if each.kind == "caller" and each.rank == rank:  # the others are in the call that this caller left
            try:
                pipeline.flush()
            except (pe.PeerFailedError, pe.UsageError):
                return
            raise AssertionError("nobody noticed that a caller left") from None


def _call(pipeline: pe.Pipeline, rank: int, each: Pass) -> None:
    breaks = [each.kind == "stage" and (number, rank) == (each.at, each.rank) for number in range(len(each.rows))]
    data = [
        pe.Microbatch((torch.ones(rows, WIDTH),), {"breaks": breaks[number]}) for number, rows in enumerate(each.rows)
    ]
    if each.kind == "step":
        pipeline.step(data, lambda outputs, _: _loss(outputs))
    elif each.kind == "forward":
        torch.stack([_loss(output) for output in pipeline.forward(data)]).sum().backward()
    elif each.kind == "no_grad":
        with torch.no_grad():
            list(pipeline.stream(data))
    else:
        _stream(pipeline, rank, each, data)


def _stream(pipeline: pe.Pipeline, rank: int, each: Pass, data: list[Any]) -> None:
    for item in pipeline.stream(data):
        if item.index == each.at:
            if each.kind == "break":
                return
            if each.kind == "caller" and each.rank == rank:
                raise Trouble("in the caller's code")
            if each.kind == "invalidate":
                pipeline.invalidate()
            if each.kind == "skip":
                pipeline.skip(item)
                continue
        _loss(item.outputs).backward()


def _loss(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().sum()


def grown(samples: list[Sample]) -> dict[str, float]:
    """What the last sample has more than the first third had at most."""
    first, last = samples[: max(len(samples) // 3, 1)], samples[-1]

    def more(of: Callable[[Sample], float]) -> float:
        return of(last) - max(of(each) for each in first)

    return {
        "resident": more(lambda each: each.resident),
        "threads": more(lambda each: each.threads),
        "descriptors": more(lambda each: each.descriptors),
    }


def on_rank(rank: int, microbatches: int, schedule: str, seed: int) -> list[dict[str, Any]]:
    return [asdict(each) for each in soak(pe.TorchTransport(), microbatches, schedule=schedule, seed=seed)]


def held(rank: int) -> dict[str, int]:
    """Threads and file descriptors that a pipeline of this rank adds to a process with a gloo group."""
    before = sample(0)
    transport = pe.TorchTransport()
    graph = pe.StageGraph.chain(transport.num_ranks, transport.num_ranks)
    with pe.Pipeline({rank: Stage(rank)}, graph=graph, schedule="1f1b", transport=transport) as pipeline:
        list(pipeline.stream([]))
        after = sample(0)
    return {"threads": after.threads - before.threads, "descriptors": after.descriptors - before.descriptors}


@frozen
class Soak:
    """How many microbatches over how many ranks; written ``ranks:microbatches``."""

    ranks: int
    microbatches: int

    @classmethod
    def parse(cls, text: str) -> Soak:
        ranks, microbatches = map(int, text.split(":"))
        return cls(ranks, microbatches)

    def run(self, schedule: str, seed: int) -> dict[str, Any]:
        """What every rank held, sample by sample, and what was done to it."""
        began = monotonic()
        arguments = (self.microbatches, schedule, seed)
        samples = run_ranks(on_rank, self.ranks, *arguments, timeout=60 + self.microbatches)
        kinds = Counter(each.kind for each in passes(self.microbatches, self.ranks, seed))
        return {**asdict(self), "seconds": monotonic() - began, "passes": kinds, "samples": samples}


HEADS = [
    "ranks",
    "microbatches",
    "seconds",
    "more MiB",
    "more threads",
    "more descriptors",
    "MiB",
    "threads",
    "descriptors",
]


def row(figures: dict[str, Any]) -> list[str]:
    """What the rank that has grown most has grown by, and what the fullest one holds at the end."""
    ranks = [[Sample(**each) for each in samples] for samples in figures["samples"]]
    more, last = [grown(samples) for samples in ranks], [samples[-1] for samples in ranks]
    return [
        str(figures["ranks"]),
        str(last[0].microbatches),
        f"{figures['seconds']:.0f}",
        f"{max(each['resident'] for each in more):.1f}",
        f"{max(each['threads'] for each in more):.0f}",
        f"{max(each['descriptors'] for each in more):.0f}",
        f"{max(each.resident for each in last):.0f}",
        str(max(each.threads for each in last)),
        str(max(each.descriptors for each in last)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of each: within 90 seconds")
    parser.add_argument("--soaks", nargs="+", type=Soak.parse, default=[Soak(3, 20_000), Soak(8, 4_000)])
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.quick:
        given.soaks = [Soak(3, 2_000), Soak(8, 400)]
    record = Record()
    found = [each.run(given.schedule, given.seed) for each in with_bar(given.soaks, "pipelines")]
    print(markdown(HEADS, map(row, found)))
    for each in found:
        print(f"passes over {each['ranks']} ranks: {dict(sorted(each['passes'].items()))}")
    holds = run_ranks(held, 8, timeout=120)
    print(f"held by a pipeline of 8 ranks, by rank: {holds}")
    record.end(given.json, soaks=found, held=holds)


if __name__ == "__main__":
    main()
