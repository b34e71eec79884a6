"""Scale: seconds and memory for plans of many ranks and microbatches, each case in a process of its own.

python -m benchmarks.scale            all cases, as a table
python -m benchmarks.scale CASE ..    these only
"""

from __future__ import annotations

import gc
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable

from attrs import frozen

import pipeline_engine as pe
from pipeline_engine.plan.check import check_computing
from pipeline_engine.plan.schedules import SCHEDULES, generate

_GIB = 2.0**20  # getrusage counts in KiB


@frozen
class Case:
    """What is planned, and how.

    Attributes:
        streams: generate and check the computing verbs rank by rank; otherwise build, lower, check and simulate.
        collects: whether Python's garbage collector runs, which finds nothing in a plan and visits all of it.
    """

    schedule: str
    ranks: int
    microbatches: int
    streams: bool
    collects: bool = True

    @property
    def graph(self) -> pe.StageGraph:
        """A chain with one stage a rank, or two where the schedule wants several."""
        placement = SCHEDULES[self.schedule].placement
        stages = self.ranks * (1 if placement == "straight" else 2)
        return pe.StageGraph.chain(stages, self.ranks, placement)


CASES = {
    "full-64": Case("1f1b", 64, 256, streams=False),
    "full-128": Case("1f1b", 128, 512, streams=False),
    "full-256": Case("1f1b", 256, 1024, streams=False),
    "full-256-uncollected": Case("1f1b", 256, 1024, streams=False, collects=False),
    "stream-256": Case("1f1b", 256, 1024, streams=True),
    "stream-512": Case("1f1b", 512, 2048, streams=True),
    "stream-1024": Case("1f1b", 1024, 4096, streams=True),
    "stream-1024-interleaved": Case("interleaved", 1024, 4096, streams=True),
    "stream-1024-zb-v": Case("zb-v", 1024, 4096, streams=True),
}


class Stopwatch:
    """Seconds of wall clock and of processor for each named part."""

    def __init__(self) -> None:
        self.parts: dict[str, tuple[float, float]] = {}

    def time(self, name: str, part: Callable[[], object]) -> object:
        """Call ``part`` and note what it took."""
        wall, busy = time.perf_counter(), time.process_time()
        result = part()
        self.parts[name] = (time.perf_counter() - wall, time.process_time() - busy)
        return result


def run(case: Case) -> dict[str, object]:
    """Run a case in this process."""
    if not case.collects:
        gc.disable()
    watch = Stopwatch()
    count = _stream(case, watch) if case.streams else _full(case, watch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _GIB
    return {"actions": count, "parts": watch.parts, "peak": peak}


def _stream(case: Case, watch: Stopwatch) -> int:
    counts = [0] * case.ranks
    programs = generate(case.schedule, case.graph, case.microbatches)
    counted = (_counted(rank, program, counts) for rank, program in enumerate(programs))
    watch.time("generate and check", lambda: check_computing(case.schedule, case.graph, case.microbatches, counted))
    return sum(counts)


def _counted(rank, program, counts):  # type: ignore[no-untyped-def]
    for action in program:
        counts[rank] += 1
        yield action


def _full(case: Case, watch: Stopwatch) -> int:
    schedule = watch.time("build", lambda: pe.build(case.schedule, case.graph, case.microbatches))
    assert isinstance(schedule, pe.Schedule)
    lowered = watch.time("lower", lambda: pe.lower(schedule))
    assert isinstance(lowered, pe.Schedule)
    watch.time("check", lambda: pe.check(lowered))
    watch.time("simulate", lambda: pe.simulate(lowered, pe.Costs()))
    return sum(map(len, lowered.programs))


def main(names: list[str]) -> None:
    """Run cases one after the other and print a table."""
    print(f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("| case | schedule | ranks x microbatches | actions | seconds (processor) | peak GiB | us per action |")
    print("|---|---|---|---|---|---|---|")
    for name in names or list(CASES):
        case = CASES[name]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.scale", "--here", name], check=True, capture_output=True, text=True
        )
        found = json.loads(done.stdout)
        wall, busy = (sum(part[i] for part in found["parts"].values()) for i in (0, 1))
        parts = ", ".join(f"{part} {seconds[0]:.1f}" for part, seconds in found["parts"].items())
        print(
            f"| {name} | {case.schedule} | {case.ranks} x {case.microbatches} | {found['actions']:,} "
            f"| {wall:.1f} ({busy:.1f}): {parts} | {found['peak']:.2f} | {busy / found['actions'] * 1e6:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        print(json.dumps(run(CASES[sys.argv[2]])))
    else:
        main(sys.argv[1:])
