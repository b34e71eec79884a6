"""How time, memory and set-up grow with ranks, microbatches and stages: ``python -m benchmarks.scaling``.

Empty stages under the caller's own loop, with ranks as threads over memory and as processes over gloo. Each case runs
in new processes. What is asked is not how long an action takes but whether that depends on how many there are.

The page is scaling.md; its picture is drawn with ``--svg FILE``, which needs matplotlib.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict, evolve, frozen

import pipeline_engine as pe
from art_adapter.progress import say, with_bar
from benchmarks.record import Record
from benchmarks.sleeping import Sleeping
from benchmarks.steps import ROWS, SECONDS_TO_START, WIDTH, streaming, warm_up
from benchmarks.tables import markdown, spread
from pipeline_engine.launch import run_ranks
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.testing import run_ranks_in_threads

GROWS = ("ranks", "microbatches", "share")
KINDS = ("threads", "processes")
MIB = 2.0**20
SECONDS_EACH = 300.0


@frozen
class Case:
    """One size of a pipeline.

    Attributes:
        kind: of ``KINDS``; threads share a process and ``MemoryTransport``.
        ranks, microbatches: how many.
        share: stages on each rank.
    """

    kind: str
    ranks: int = 2
    microbatches: int = 64
    share: int = 1

    @property
    def actions(self) -> int:
        """Forwards and backwards on all ranks."""
        return 2 * self.ranks * self.share * self.microbatches

    @property
    def graph(self) -> pe.StageGraph:
        return pe.StageGraph.chain(self.ranks * self.share, self.ranks, "straight" if self.share == 1 else "looped")


@frozen
class Cost:
    """What one case cost.

    Attributes:
        steps: for each step the processor's seconds on all ranks together.
        set_up: seconds of the wall clock from nothing to the end of the first step, less a second step, on the slowest
            rank.
        memory: bytes by which a rank's memory grew over all of it, at most; threads share theirs, and this is their
            part.
    """

    steps: tuple[float, ...]
    set_up: float
    memory: float

    def of_action(self, case: Case) -> list[float]:
        """Microseconds of the processor for each action, by step."""
        return [step / case.actions * 1e6 for step in self.steps]


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.splitlines()[0])
    made.add_argument("--quick", action="store_true", help="three small sizes of each: within 90 seconds")
    made.add_argument("--grows", nargs="+", choices=GROWS, default=GROWS, metavar="WHAT", help=", ".join(GROWS))
    made.add_argument("--repeats", type=int, default=7, metavar="N", help="steps of each case")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every figure as data")
    made.add_argument("--svg", type=Path, metavar="FILE", help="draw the figures; needs matplotlib")
    options = made.parse_args()
    record = Record()
    series = {name: cases for name, cases in series_of(options.quick).items() if name in options.grows}
    costs: dict[Case, Cost] = {}
    for case in with_bar(list(dict.fromkeys(chain.from_iterable(series.values()))), "cases"):
        costs[case] = measured(case, 3 if options.quick else options.repeats)
        say(" ".join(row(case, costs[case])))
    print(tables(series, costs))
    if options.svg:
        draw(series, costs, options.svg)
    record.end(options.json, cases=[{**asdict(case), **asdict(cost)} for case, cost in costs.items()])


def series_of(quick: bool) -> dict[str, list[Case]]:
    """By the name of what grows, the cases of both kinds, in growing order."""
    all_sizes = [(2, 4, 8, 16), (8, 32, 128, 512, 2048, 4096), (1, 2, 4, 8)]
    few_sizes = [(2, 4, 8), (8, 32, 128), (1, 2)]
    grows: Iterable[tuple[str, tuple[int, ...]]] = zip(GROWS, few_sizes if quick else all_sizes, strict=True)
    return {name: [Case(kind, **{name: size}) for kind in KINDS for size in sizes] for name, sizes in grows}


def measured(case: Case, repeats: int) -> Cost:
    """Run a case in new processes."""
    limit = SECONDS_TO_START + SECONDS_EACH
    if case.kind == "threads":
        return run_ranks(in_threads, 1, case, repeats, timeout=limit)[0]  # type: ignore[no-any-return]
    return together(run_ranks(in_process, case.ranks, case, repeats, timeout=limit))


def in_threads(_: int, case: Case, repeats: int) -> Cost:
    meeting = threading.Barrier(case.ranks)
    before = resident()

    def rank(transport: Transport) -> Cost:
        return run(transport, case, repeats, meeting.wait, time.thread_time)

    cost = together(run_ranks_in_threads(rank, case.ranks, timeout=SECONDS_EACH))
    return evolve(cost, memory=(peak() - before) / case.ranks)


def in_process(_: int, case: Case, repeats: int) -> Cost:
    before = resident()
    cost = run(pe.TorchTransport(), case, repeats, dist.barrier, time.process_time)
    return evolve(cost, memory=peak() - before)


def run(transport: Transport, case: Case, repeats: int, meet: Callable[[], Any], clock: Callable[[], float]) -> Cost:
    """One rank's part; ``clock`` counts the processor's time on this rank."""
    stages = {stage: Sleeping(WIDTH) for stage in case.graph.stages_of(transport.rank)}
    inputs = list(torch.zeros(case.microbatches, ROWS, WIDTH))
    schedule = "1f1b" if case.share == 1 else "interleaved"
    start = time.perf_counter()
    with pe.Pipeline(stages, graph=case.graph, schedule=schedule, transport=transport, deadline=60.0) as pipeline:
        step = streaming(pipeline, inputs)
        warm_up(step, stages, ROWS * case.microbatches, times=1)
        first = time.perf_counter()
        warm_up(step, stages, ROWS * case.microbatches, times=1)
        set_up = 2 * first - start - time.perf_counter()
        return Cost(tuple(seconds_of(step, meet, clock) for _ in range(repeats)), set_up, 0.0)


def seconds_of(step: Callable[[], None], meet: Callable[[], Any], clock: Callable[[], float]) -> float:
    meet()
    before = clock()
    step()
    return clock() - before


def together(by_rank: Iterable[Cost]) -> Cost:
    costs = list(by_rank)
    steps = tuple(map(sum, zip(*(cost.steps for cost in costs), strict=True)))
    return Cost(steps, max(cost.set_up for cost in costs), max(cost.memory for cost in costs))


def resident() -> float:
    """Bytes of this process in memory, once a pipeline of one rank has loaded what every pipeline needs."""
    alone = Case("threads", ranks=1, microbatches=1)
    run_ranks_in_threads(lambda transport: run(transport, alone, 1, int, time.thread_time), 1)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0  # KiB on Linux


def tables(series: dict[str, list[Case]], costs: dict[Case, Cost]) -> str:
    """Every case, and how the whole cost grows: with the size to the power of the exponent."""
    heads = ["kind", "ranks", "microbatches", "stages a rank", "us per action", "set-up", "memory a rank"]
    cases = markdown(heads, [row(case, cost) for case, cost in costs.items()])
    growth = [
        (name, kind, *(f"{exponent(name, own, costs, figure):.2f}" for figure in FIGURES.values()))
        for name, among in series.items()
        for kind in KINDS
        for own in [[case for case in among if case.kind == kind]]
    ]
    return f"{cases}\n\nExponents of the whole:\n\n{markdown(['grows', 'kind', *FIGURES], growth)}\n"


def row(case: Case, cost: Cost) -> tuple[str, ...]:
    sizes = (str(case.ranks), str(case.microbatches), str(case.share))
    return (
        case.kind,
        *sizes,
        spread(cost.of_action(case), 0),
        f"{cost.set_up:.2f} s",
        f"{cost.memory / MIB:.1f} MiB",
    )


FIGURES: dict[str, Callable[[Case, Cost], float]] = {
    "processor time": lambda case, cost: statistics.median(cost.steps),
    "set-up": lambda case, cost: cost.set_up,
    "memory": lambda case, cost: cost.memory * case.ranks,
}


def exponent(name: str, cases: list[Case], costs: dict[Case, Cost], figure: Callable[[Case, Cost], float]) -> float:
    """Of the growth from the last size but one to the last, where what is constant weighs least."""
    (small, large) = cases[-2:]
    grown = figure(large, costs[large]) / figure(small, costs[small])
    return math.log(grown) / math.log(getattr(large, name) / getattr(small, name))


PANELS: dict[str, Callable[[Case, Cost], float]] = {
    "processor, us per action": lambda case, cost: statistics.median(cost.of_action(case)),
    "set-up, seconds": lambda case, cost: cost.set_up,
    "memory a rank, MiB": lambda case, cost: cost.memory / MIB,
}
TITLES = {"ranks": "ranks", "microbatches": "microbatches", "share": "stages on a rank"}


def draw(series: dict[str, list[Case]], costs: dict[Case, Cost], file: Path) -> None:
    """A panel for each figure and each thing that grows.

    Linear growth is a level line in the upper row; in the others, a doubling for each doubling.
    """
    from matplotlib.figure import Figure  # of no use but here

    figure = Figure(figsize=(10, 8), layout="constrained")
    panels = figure.subplots(len(PANELS), len(series), sharex="col", sharey="row", squeeze=False)
    for across, (name, cases) in enumerate(series.items()):
        for down, (label, value) in enumerate(PANELS.items()):
            panel = panels[down][across]
            for kind in KINDS:
                own = [case for case in cases if case.kind == kind]
                sizes = [getattr(case, name) for case in own]
                panel.plot(sizes, [value(case, costs[case]) for case in own], marker="o", label=kind)
            panel.set_xscale("log", base=2)
            panel.set_xticks(sizes, [f"{size // 1024}k" if size >= 1024 else str(size) for size in sizes])
            if down > 0:
                panel.set_yscale("log", base=2)
                panel.yaxis.set_major_formatter("{x:.2g}")
            panel.grid(alpha=0.3)
            if across == 0:
                panel.set_ylabel(label)
        panels[-1][across].set_xlabel(TITLES[name])
    panels[0][0].set_ylim(bottom=0)
    panels[0][0].legend()
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    main()
