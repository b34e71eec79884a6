"""What a split backward gains, and what the engine adds to it: ``python -m benchmarks.zero_bubble``.

Sleeping stages whose forward and both halves of the backward sleep. The makespan of ``zb-h1`` and ``zb-v``, and of
``1f1b`` beside them, over two bounds: that of the nominal times, and that of the times which the actions took in the
same step.

The page is zero_bubble.md.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

import torch
from attrs import asdict, frozen

import pipeline_engine as pe
from art_adapter.progress import with_bar
from benchmarks.record import Record
from benchmarks.sleeping import Naps, Sleeping
from benchmarks.steps import (
    ROWS,
    SECONDS_TO_START,
    WIDTH,
    Makespans,
    Repeat,
    bound_of_step,
    engine_steps,
    graph_for,
    timed,
    warm_up,
)
from benchmarks.tables import markdown, ratios, spread
from pipeline_engine.launch import run_ranks

PLAIN = "1f1b"
SCHEDULES = (PLAIN, "zb-h1", "zb-v")

Key = tuple[float, str, str]  # seconds of an action, schedule, driver


@frozen
class Settings:
    """What is measured; ``seconds`` are those of each third of a rank's work, spread evenly over its stages."""

    ranks: tuple[int, ...]
    microbatches: int
    seconds: tuple[float, ...]
    repeats: int

    def planned(self, schedule: str, ranks: int) -> pe.Schedule:
        """The schedule that is run."""
        return pe.build(schedule, graph_for(schedule, ranks), num_microbatches=self.microbatches)

    def nominal(self, schedule: str, ranks: int, seconds: float) -> float:
        """Makespan if every action took what it should take, and nothing else took time."""
        planned = self.planned(schedule, ranks)
        each = seconds / len(planned.graph.stages_of(0))
        return pe.simulate(planned, pe.Costs(forward=each, backward_input=each, backward_weight=each)).makespan


@frozen
class Row:
    """One driver of one schedule; ``nominal`` in seconds."""

    seconds: float
    schedule: str
    driver: str
    ranks: int
    nominal: float
    makespans: Makespans


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m benchmarks.zero_bubble", description=__doc__.splitlines()[0])
    made.add_argument("--quick", action="store_true", help="2 and 4 ranks, 20 ms, 3 repeats: within 90 seconds")
    made.add_argument("--ranks", nargs="+", type=int, default=(2, 4, 8), metavar="P")
    made.add_argument("--microbatches", type=int, default=15, metavar="M")
    made.add_argument(
        "--milliseconds", nargs="+", type=float, default=(20.0, 50.0), metavar="MS", help="of F, I, W each"
    )
    made.add_argument("--repeats", type=int, default=7, metavar="N")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every makespan as data")
    options = made.parse_args()
    if options.quick:
        options.ranks, options.milliseconds, options.repeats = (2, 4), (20.0,), 3
    seconds = tuple(each / 1e3 for each in options.milliseconds)
    settings = Settings(tuple(options.ranks), options.microbatches, seconds, options.repeats)
    record = Record()
    rows = [row for ranks in with_bar(settings.ranks, "numbers of ranks") for row in measure(ranks, settings)]
    print("\n".join(table(rows, each) for each in settings.seconds))
    record.end(options.json, settings=asdict(settings), rows=[asdict(row) for row in rows])


def measure(ranks: int, settings: Settings) -> list[Row]:
    steps = settings.repeats * 2 * len(SCHEDULES)
    longest = 3 * sum(settings.seconds) * (settings.microbatches + ranks)
    limit = SECONDS_TO_START + 2 * steps * longest
    by_rank: list[dict[Key, list[Repeat]]] = run_ranks(repeats_on_rank, ranks, ranks, settings, timeout=limit)
    return [row_of(key, ranks, settings, [repeats[key] for repeats in by_rank]) for key in by_rank[0]]


def row_of(key: Key, ranks: int, settings: Settings, by_rank: list[list[Repeat]]) -> Row:
    seconds, schedule, _ = key
    planned = settings.planned(schedule, ranks)
    makespans = Makespans.of(by_rank, lambda step: bound_of_step(planned, step))
    return Row(*key, ranks, settings.nominal(schedule, ranks, seconds), makespans)


def repeats_on_rank(rank: int, ranks: int, settings: Settings) -> dict[Key, list[Repeat]]:
    """Every repeat on this rank; schedules and drivers take turns."""
    inputs = list(torch.zeros(settings.microbatches, ROWS, WIDTH))
    stages: dict[str, dict[int, Sleeping]] = {}
    steps = {}
    with ExitStack() as stack:
        for schedule in SCHEDULES:
            graph = graph_for(schedule, ranks)
            own = stages[schedule] = {stage: Sleeping(WIDTH) for stage in graph.stages_of(rank)}
            pipeline = pe.Pipeline(own, graph=graph, schedule=schedule, transport=pe.TorchTransport(), deadline=60.0)
            for driver, step in engine_steps(stack.enter_context(pipeline), inputs).items():
                warm_up(step, own, ROWS * len(inputs))
                steps[schedule, driver] = step
        found: dict[Key, list[Repeat]] = {}
        for seconds in settings.seconds:
            for own in stages.values():
                for stage in own.values():
                    stage.naps = Naps(seconds / len(own), seconds / len(own), seconds / len(own))
            for _ in range(settings.repeats):
                for (schedule, driver), step in steps.items():
                    found.setdefault((seconds, schedule, driver), []).append(timed(step, stages[schedule]))
    return found


def table(rows: list[Row], seconds: float) -> str:
    """A line for each schedule and driver; what is gained is measured against ``1f1b`` under the same driver."""
    rows = [row for row in rows if row.seconds == seconds]
    plain = {(row.ranks, row.driver): row for row in rows if row.schedule == PLAIN}
    lines = []
    for row in rows:
        beside, makespans = plain[row.ranks, row.driver], row.makespans
        over_nominal = spread([each / row.nominal for each in makespans.measured])
        promised, gained = row.nominal / beside.nominal, ratios(makespans.measured, beside.makespans.measured)
        place = (str(row.ranks), row.schedule, row.driver, f"{row.nominal:.3f} s")
        lines.append((*place, over_nominal, f"{makespans.share:.2f} %", f"{promised:.3f}", gained))
    heads = ["ranks", "schedule", "driver", "nominal", "over nominal", "engine", "promised over 1f1b", "over 1f1b"]
    return f"{seconds * 1e3:g} ms each:\n\n{markdown(heads, lines)}\n"


if __name__ == "__main__":
    main()
