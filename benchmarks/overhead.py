"""What the engine itself costs: stages with nothing to do, beside torch's engine: ``python -m benchmarks.overhead``.

Microseconds of a step for each action (a microbatch's forward or backward on a rank) and for each transfer (an
activation or a gradient that a rank sends), and a profile that says which parts of the engine take them.

The page is overhead.md.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path, PurePath

import torch
from attrs import asdict, frozen

import pipeline_engine as pe
from art_adapter.progress import with_bar
from benchmarks.caller_owned_loss import SCHEDULES, drivers_of
from benchmarks.record import Record
from benchmarks.sleeping import Sleeping
from benchmarks.steps import ROWS, SECONDS_TO_START, WIDTH, Repeat, graph_for, measured, timed_in_turns, warm_up
from benchmarks.tables import markdown, ratios, spread
from pipeline_engine.launch import run_ranks

DRIVERS = ("stream", "step", "torch")
WAITS = ("poll", "acquire")  # built-in functions in which a rank waits for others
PROFILED_STEPS = 50

Key = tuple[str, str]  # schedule, driver


@frozen
class Settings:
    """What is measured."""

    schedules: tuple[str, ...]
    ranks: tuple[int, ...]
    microbatches: int
    repeats: int

    @property
    def actions(self) -> int:
        """Of one rank in one step."""
        return 2 * self.microbatches

    def transfers(self, schedule: str, ranks: int) -> float:
        """Activations and gradients that a rank sends in one step, on average; outputs and losses not counted."""
        graph = graph_for(schedule, ranks)
        cuts = sum(graph.rank_of[before] != graph.rank_of[after] for before, after in graph.edges)
        return 2 * self.microbatches * cuts / ranks


@frozen
class Row:
    """One driver of one schedule; ``makespans``: of its steps, in seconds."""

    ranks: int
    schedule: str
    driver: str
    makespans: tuple[float, ...]


@frozen
class Part:
    """A part of the engine: microseconds of rank 0's own thread for each action, without waits, while profiled."""

    name: str
    microseconds: float


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__.splitlines()[0])
    made.add_argument("--quick", action="store_true", help="fewer repeats of fewer schedules: within 90 seconds")
    made.add_argument("--schedules", nargs="+", choices=SCHEDULES, metavar="SCHEDULE")
    made.add_argument("--ranks", nargs="+", type=int, default=(2, 4), metavar="P")
    made.add_argument("--microbatches", type=int, default=16, metavar="M")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every makespan as data")
    options = made.parse_args()
    schedules = options.schedules or (("1f1b", "interleaved") if options.quick else SCHEDULES)
    settings = Settings(tuple(schedules), tuple(options.ranks), options.microbatches, 20 if options.quick else 100)
    record = Record()
    rows = [row for ranks in with_bar(settings.ranks, "numbers of ranks") for row in measure(ranks, settings)]
    parts = profile(settings)
    print(tables(rows, parts, settings))
    data = {"rows": [asdict(row) for row in rows], "profile": [asdict(part) for part in parts]}
    record.end(options.json, settings=asdict(settings), **data)


def measure(ranks: int, settings: Settings) -> list[Row]:
    limit = SECONDS_TO_START + settings.repeats * len(DRIVERS) * len(settings.schedules)
    by_rank: list[dict[Key, list[Repeat]]] = run_ranks(repeats_on_rank, ranks, ranks, settings, timeout=limit)
    return [Row(ranks, *key, measured([repeats[key] for repeats in by_rank])) for key in by_rank[0]]


def repeats_on_rank(rank: int, ranks: int, settings: Settings) -> dict[Key, list[Repeat]]:
    """Every repeat on this rank; drivers take turns."""
    inputs = list(torch.zeros(settings.microbatches, ROWS, WIDTH))
    found: dict[Key, list[Repeat]] = {}
    for schedule in settings.schedules:
        graph = graph_for(schedule, ranks)
        stages = {stage: Sleeping(WIDTH) for stage in graph.stages_of(rank)}
        with drivers_of(schedule, graph, stages, inputs, DRIVERS) as drivers:
            for step in drivers.values():
                warm_up(step, stages, ROWS * len(inputs))
            turns = timed_in_turns(drivers, stages, settings.repeats)
        found |= {(schedule, driver): repeats for driver, repeats in turns.items()}
    return found


def profile(settings: Settings) -> list[Part]:
    """Where the first rank of two spends a stream of ``1f1b``, most first."""
    by_rank: list[dict[str, float]] = run_ranks(profile_on_rank, 2, settings, timeout=SECONDS_TO_START)
    actions = settings.actions * PROFILED_STEPS
    return [
        Part(name, 1e6 * seconds / actions) for name, seconds in sorted(by_rank[0].items(), key=lambda each: -each[1])
    ]


def profile_on_rank(rank: int, settings: Settings) -> dict[str, float]:
    """Seconds by file of the engine, and by kind of what it calls; both ranks are profiled, so that none waits more."""
    inputs = list(torch.zeros(settings.microbatches, ROWS, WIDTH))
    stages = {rank: Sleeping(WIDTH)}
    profiler = cProfile.Profile()
    with drivers_of("1f1b", pe.StageGraph.chain(2, 2), stages, inputs, ("stream",)) as drivers:
        warm_up(drivers["stream"], stages, ROWS * len(inputs))
        profiler.enable()
        for _ in range(PROFILED_STEPS):
            drivers["stream"]()
        profiler.disable()
    seconds: defaultdict[str, float] = defaultdict(float)
    for (file, _, function), (_, _, own, _, callers) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        if not any(wait in function for wait in WAITS):
            for name, share in _shares(file, function, own, callers):
                seconds[name] += share
    return dict(seconds)


def _shares(
    file: str, function: str, own: float, callers: dict[tuple[str, int, str], tuple[float, ...]]
) -> list[tuple[str, float]]:
    """A function's own seconds by part; those of a built-in one count for the files that call it."""
    if file != "~" or "run_backward" in function or "_socket" in function:
        return [(_part(file, function), own)]
    return [(_part(caller, name), called[2]) for (caller, _, name), called in callers.items()]


def _part(file: str, function: str) -> str:
    path = PurePath(file)
    if "pipeline_engine" in path.parts:
        return f"{path.parent.name}/{path.name}"
    if "benchmarks" in path.parts:
        return "the stages and the loss"
    if "run_backward" in function:
        return "autograd's backward"
    if "_socket" in function:
        return "the system: sockets"
    return "torch's Python" if "torch" in path.parts else "Python's library and attrs"


def tables(rows: Sequence[Row], parts: Sequence[Part], settings: Settings) -> str:
    """Microseconds per action and transfer, and the profile."""
    peers = {(row.ranks, row.schedule): row for row in rows if row.driver == "torch"}
    lines = [
        (
            str(row.ranks),
            row.schedule,
            row.driver,
            spread([1e6 * each / settings.actions for each in row.makespans], 0),
            spread([1e6 * each / settings.transfers(row.schedule, row.ranks) for each in row.makespans], 0),
            ratios(row.makespans, peers[row.ranks, row.schedule].makespans),
        )
        for row in rows
    ]
    total = sum(part.microseconds for part in parts)
    shares = [(part.name, f"{part.microseconds:.1f}", f"{100 * part.microseconds / total:.0f} %") for part in parts]
    heads = ["ranks", "schedule", "driver", "us per action", "us per transfer", "over torch"]
    return "\n".join(
        [
            f"Empty stages, {settings.microbatches} microbatches, {settings.repeats} alternating steps.\n",
            markdown(heads, lines),
            "\nProfile of stream, 1f1b, first rank of two, without waits.\n",
            markdown(["part", "us per action", "share"], shares[:16]) + "\n",
        ]
    )


if __name__ == "__main__":
    main()
