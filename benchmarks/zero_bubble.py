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
from benchmarks.plans import chosen, rows_of
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

Key = tuple[str, str]  # schedule, driver


@frozen
class Settings:
    """What is measured; ``seconds`` are those of each third of a rank's work, spread evenly over its stages."""

    schedules: tuple[str, ...]
    ranks: tuple[int, ...]
    seconds: float
    repeats: int
    microbatches: int = 15

    def planned(self, schedule: str, ranks: int) -> pe.Schedule:
        """The schedule that is run."""
        return pe.build(schedule, graph_for(schedule, ranks), num_microbatches=self.microbatches)

    def each(self, schedule: str) -> float:
        """Seconds of an action."""
        return self.seconds / len(graph_for(schedule, 1).stages_of(0))

    def nominal(self, schedule: str, ranks: int) -> float:
        """Makespan if every action took what it should take, and nothing else took time."""
        planned, each = self.planned(schedule, ranks), self.each(schedule)
        return pe.simulate(planned, pe.Costs(forward=each, backward_input=each, backward_weight=each)).makespan


# Two stages a rank halve the actions of zb-v: to have them take 20 and 50 ms, a rank's third takes 40 and 100.
FULL = (
    Settings(SCHEDULES, ranks=(2, 4, 8), seconds=0.02, repeats=7),
    Settings((PLAIN, "zb-v"), ranks=(2, 4, 8), seconds=0.04, repeats=7),
    Settings((PLAIN, "zb-h1"), ranks=(4, 8), seconds=0.05, repeats=7),
    Settings((PLAIN, "zb-v"), ranks=(4,), seconds=0.1, repeats=7),
)
QUICK = (Settings(SCHEDULES, ranks=(2, 4), seconds=0.02, repeats=3),)


@frozen
class Row:
    """One driver of one schedule; ``nominal`` and ``each``, what an action takes, in seconds."""

    schedule: str
    driver: str
    ranks: int
    each: float
    nominal: float
    makespans: Makespans


def main() -> None:
    options = vars(parser().parse_args())
    file, record = options.pop("json"), Record()
    if milliseconds := options.pop("milliseconds"):
        options["seconds"] = milliseconds / 1e3
    found = rows_of(chosen(options, full=FULL, quick=QUICK), measure)
    print("\n".join(table(rows, settings) for settings, rows in found))
    record.end(file, runs=[{"settings": asdict(settings), "rows": list(map(asdict, rows))} for settings, rows in found])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.zero_bubble",
        description=f"{__doc__.splitlines()[0]} Any option but --quick and --json replaces the plan by one run.",
    )
    made.add_argument("--quick", action="store_true", help="2 and 4 ranks, 20 ms, 3 repeats: within 90 seconds")
    made.add_argument("--schedules", nargs="+", choices=SCHEDULES, metavar="SCHEDULE", help=f"{PLAIN} among them")
    made.add_argument("--ranks", nargs="+", type=int, metavar="P")
    made.add_argument("--microbatches", type=int, metavar="M")
    made.add_argument("--milliseconds", type=float, metavar="MS", help="of a rank's F, I and W each")
    made.add_argument("--repeats", type=int, metavar="N")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every makespan as data")
    return made


def measure(settings: Settings, ranks: int) -> list[Row]:
    steps = settings.repeats * 2 * len(settings.schedules)
    longest = 3 * settings.seconds * (settings.microbatches + ranks)
    limit = SECONDS_TO_START + 2 * steps * longest
    by_rank: list[dict[Key, list[Repeat]]] = run_ranks(repeats_on_rank, ranks, ranks, settings, timeout=limit)
    return [row_of(key, ranks, settings, [repeats[key] for repeats in by_rank]) for key in by_rank[0]]


def row_of(key: Key, ranks: int, settings: Settings, by_rank: list[list[Repeat]]) -> Row:
    planned, schedule = settings.planned(key[0], ranks), key[0]
    makespans = Makespans.of(by_rank, lambda step: bound_of_step(planned, step))
    return Row(*key, ranks, settings.each(schedule), settings.nominal(schedule, ranks), makespans)


def repeats_on_rank(rank: int, ranks: int, settings: Settings) -> dict[Key, list[Repeat]]:
    """Every repeat on this rank; schedules and drivers take turns."""
    inputs = list(torch.zeros(settings.microbatches, ROWS, WIDTH))
    stages: dict[str, dict[int, Sleeping]] = {}
    steps = {}
    with ExitStack() as stack:
        for schedule in settings.schedules:
            graph = graph_for(schedule, ranks)
            own = stages[schedule] = {stage: Sleeping(WIDTH) for stage in graph.stages_of(rank)}
            pipeline = pe.Pipeline(own, graph=graph, schedule=schedule, transport=pe.TorchTransport(), deadline=60.0)
            for driver, step in engine_steps(stack.enter_context(pipeline), inputs).items():
                warm_up(step, own, ROWS * len(inputs))
                steps[schedule, driver] = step
            each = settings.each(schedule)
            for stage in own.values():
                stage.naps = Naps(each, each, each)
        found: dict[Key, list[Repeat]] = {key: [] for key in steps}
        for _ in range(settings.repeats):
            for key, step in steps.items():
                found[key].append(timed(step, stages[key[0]]))
    return found


def table(rows: list[Row], settings: Settings) -> str:
    """A line for each schedule and driver; what is gained is measured against ``1f1b`` under the same driver."""
    plain = {(row.ranks, row.driver): row for row in rows if row.schedule == PLAIN}
    lines = []
    for row in rows:
        beside, makespans = plain[row.ranks, row.driver], row.makespans
        over_nominal = spread([each / row.nominal for each in makespans.measured])
        promised, gained = row.nominal / beside.nominal, ratios(makespans.measured, beside.makespans.measured)
        place = (str(row.ranks), row.schedule, row.driver, f"{row.each * 1e3:g} ms", f"{row.nominal:.3f} s")
        lines.append((*place, over_nominal, f"{makespans.share:.2f} %", f"{promised:.3f}", gained))
    heads = ["ranks", "schedule", "driver", "action", "nominal", "over nominal", "engine"]
    heads += ["promised over 1f1b", "over 1f1b"]
    return f"A rank's F, I and W take {settings.seconds * 1e3:g} ms each:\n\n{markdown(heads, lines)}\n"


if __name__ == "__main__":
    main()
