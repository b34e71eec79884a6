"""Scale: seconds and memory for plans of many ranks and microbatches, and what the replica costs at each event.

``python -m benchmarks.scale`` prints a table of all cases.  Each case runs in a process of its own.

The page is scale.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from attrs import frozen

import pipeline_engine as pe
from art_adapter.progress import say, with_bar
from pipeline_engine.plan.actions import Compute
from pipeline_engine.plan.advance import Replica
from pipeline_engine.plan.check import check_computing
from pipeline_engine.plan.schedules import generate

T = TypeVar("T")
_GIB = 2.0**20  # getrusage counts in KiB


@frozen
class Case:
    """What is planned, and how.

    Attributes:
        part: ``"full"`` builds, lowers, checks and simulates; ``"stream"`` generates and checks the computing verbs,
            rank by rank; ``"all ranks"`` and ``"one rank"`` play a caller who gives each gradient at once on a replica.
    """

    part: str
    schedule: str
    ranks: int
    microbatches: int

    @property
    def graph(self) -> pe.StageGraph:
        """A chain with one stage a rank, or two where the schedule wants several."""
        placement = pe.SCHEDULES[self.schedule].placement
        stages = self.ranks * (1 if placement == "straight" else 2)
        return pe.StageGraph.chain(stages, self.ranks, placement)


CASES = {
    "full-64": Case("full", "1f1b", 64, 256),
    "full-128": Case("full", "1f1b", 128, 512),
    "full-256": Case("full", "1f1b", 256, 1024),
    "stream-256": Case("stream", "1f1b", 256, 1024),
    "stream-512": Case("stream", "1f1b", 512, 2048),
    "stream-1024": Case("stream", "1f1b", 1024, 4096),
    "events-1f1b": Case("one rank", "1f1b", 8, 64),
    "events-1f1b-all": Case("all ranks", "1f1b", 8, 64),
    "events-interleaved": Case("one rank", "interleaved", 8, 64),
    "events-zb-v": Case("one rank", "zb-v", 8, 64),
}


QUICK = [name for name in CASES if name not in ("full-256", "stream-1024")]


class Stopwatch:
    """Seconds of wall clock and of processor for each named part."""

    def __init__(self) -> None:
        self.parts: dict[str, tuple[float, float]] = {}

    def time(self, name: str, part: Callable[[], T]) -> T:
        """Call ``part`` and note what it took."""
        wall, busy = time.perf_counter(), time.process_time()
        result = part()
        self.parts[name] = (time.perf_counter() - wall, time.process_time() - busy)
        return result


def run(case: Case) -> dict[str, object]:
    """Run a case in this process."""
    watch = Stopwatch()
    count = _PARTS[case.part](case, watch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _GIB
    return {"count": count, "parts": watch.parts, "peak": peak}


def _full(case: Case, watch: Stopwatch) -> int:
    schedule = watch.time("build", lambda: pe.build(case.schedule, case.graph, case.microbatches))
    lowered = watch.time("lower", lambda: pe.lower(schedule))
    watch.time("check", lambda: pe.check(lowered))
    watch.time("simulate", lambda: pe.simulate(lowered, pe.Costs()))
    return sum(map(len, lowered.programs))


def _stream(case: Case, watch: Stopwatch) -> int:
    counts = [0] * case.ranks
    programs = generate(case.schedule, case.graph, case.microbatches)
    counted = [_counted(rank, program, counts) for rank, program in enumerate(programs)]
    watch.time("generate and check", lambda: check_computing(case.schedule, case.graph, case.microbatches, counted))
    return sum(counts)


def _counted(rank: int, program: Iterable[Compute], counts: list[int]) -> Iterator[Compute]:
    for action in program:
        counts[rank] += 1
        yield action


def _events(case: Case, watch: Stopwatch) -> int:
    schedule = pe.build(case.schedule, case.graph, case.microbatches)
    rank = None if case.part == "all ranks" else case.ranks // 2
    _play(Replica(schedule, rank=rank))  # warm
    watch.time("play", lambda: _play(Replica(schedule, rank=rank)))
    return 2 * case.microbatches + 2


def _play(replica: Replica) -> None:
    for microbatch in range(replica.schedule.num_microbatches):
        replica.ask(microbatch)
        replica.give([microbatch])
    replica.finish()
    replica.drain()


_PARTS: dict[str, Callable[[Case, Stopwatch], int]] = {
    "full": _full,
    "stream": _stream,
    "all ranks": _events,
    "one rank": _events,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="without the two largest: within 90 seconds")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure as data")
    parser.add_argument("--here", choices=list(CASES), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        print(json.dumps(run(CASES[given.here])))
        return
    print(f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("| case | schedule | ranks x microbatches | actions or events | seconds (processor) | peak GiB | us each |")
    print("|---|---|---|---|---|---|---|")
    figures = {}
    for name in with_bar(QUICK if given.quick else given.cases, "cases"):
        figures[name] = _in_its_own_process(name)
        say(_row(name, figures[name]))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


def _in_its_own_process(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.scale", "--here", name]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def _row(name: str, found: dict[str, Any]) -> str:
    case = CASES[name]
    wall, busy = (sum(part[i] for part in found["parts"].values()) for i in (0, 1))
    parts = ", ".join(f"{part} {seconds[1]:.2f}" for part, seconds in found["parts"].items())
    return (
        f"| {name} | {case.schedule} | {case.ranks} x {case.microbatches} | {found['count']:,} "
        f"| {wall:.2f} ({busy:.2f}: {parts}) | {found['peak']:.2f} | {busy / found['count'] * 1e6:.1f} |"
    )


if __name__ == "__main__":
    main()
