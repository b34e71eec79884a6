"""Packed microbatches of uneven length, against padding them for torch: ``python -m benchmarks.uneven``.

Sleeping stages whose time follows the length. The engine runs the lengths as packed, in an order and as a plan chooses;
torch.distributed.pipelining, whose microbatches have one shape, runs all of them at the length of the longest, or
repacked to equal lengths. Every turn draws new lengths.

The page is uneven.md.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from attrs import asdict, frozen
from torch import Tensor

import pipeline_engine as pe
from art_adapter.progress import with_bar
from benchmarks.record import Record
from benchmarks.sleeping import Naps, Sleeping, SleepingInTwo
from benchmarks.steps import (
    SECONDS_TO_START,
    WIDTH,
    Repeat,
    Step,
    graph_for,
    loss_of,
    measured,
    streaming,
    timed,
    warm_up,
)
from benchmarks.tables import markdown, ratios
from benchmarks.torch_peer import torch_step
from pipeline_engine.launch import run_ranks
from pipeline_engine.plan.order import in_order
from pipeline_engine.plan.outline import Outline
from pipeline_engine.plan.starts import smallest_at_both_ends
from pipeline_engine.run.ordering import Ordering

ROWS = 64  # of a microbatch of mean length
PADDED = "torch, padded to the longest"
EQUAL = "torch, repacked to equal lengths"
PACKED, BOTH_ENDS, PLANNED, CHOSEN = "as packed", "smallest at both ends", "planned order", "best_schedule"
SCHEDULES = ("1f1b", "interleaved", "zb-v")


@frozen
class Settings:
    """What is measured; ``forward`` of a rank in seconds for a microbatch of mean length, the backward twice that."""

    schedules: tuple[str, ...]
    sigmas: tuple[float, ...]
    ranks: int
    microbatches: int
    draws: int
    forward: float

    def costs(self, schedule: str, lengths: Sequence[int]) -> pe.Costs:
        """Of actions that take what they should; a rank's work is spread evenly over its stages."""
        each = self.forward * self.ranks / graph_for(schedule, self.ranks).num_stages
        weights = [length / ROWS for length in lengths]
        return pe.Costs(forward=each, backward_input=each, backward_weight=each, weights=weights)


@frozen
class Run:
    """What one driver runs in one turn.

    Attributes:
        schedule: that is run, and simulated.
        lengths: rows of the microbatches, as they are handed in.
        order: whether the engine orders them.
    """

    schedule: pe.Schedule
    lengths: tuple[int, ...]
    order: Ordering = "given"

    def costs(self, settings: Settings) -> pe.Costs:
        """Of the microbatches in the order in which they run."""
        costs = settings.costs(self.schedule.name, self.lengths)
        return in_order(costs, pe.plan_order(self.schedule, costs)) if self.order == "planned" else costs

    def simulated(self, settings: Settings) -> float:
        """Makespan in seconds if nothing but the sleeping took time."""
        return pe.simulate(self.schedule, self.costs(settings)).makespan

    def held(self, settings: Settings) -> float:
        """What the fullest rank holds at most, in microbatches of mean length with all of the rank's stages."""
        costs = self.costs(settings)
        share = len(self.schedule.graph.stages_of(0))
        return Outline.of(self.schedule, costs).peak(costs.weights) / share


@frozen
class Row:
    """One driver of one schedule, by turn: seconds measured and simulated, and what the fullest rank held."""

    sigma: float
    schedule: str
    driver: str
    measured: tuple[float, ...]
    simulated: tuple[float, ...]
    held: tuple[float, ...]


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m benchmarks.uneven", description=__doc__.splitlines()[0])
    made.add_argument("--quick", action="store_true", help="3 draws with sigma 0.5, half as long: within 90 seconds")
    made.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES, metavar="SCHEDULE")
    made.add_argument("--sigmas", nargs="+", type=float, default=(0.5, 1.0), metavar="S", help="of the logarithm")
    made.add_argument("--ranks", type=int, default=4, metavar="P")
    made.add_argument("--microbatches", type=int, default=16, metavar="M")
    made.add_argument("--draws", type=int, default=7, metavar="N", help="of lengths; one for each turn")
    made.add_argument("--forward", type=float, default=20.0, metavar="MS", help="forward of a rank, milliseconds")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every makespan as data")
    given = made.parse_args()
    if given.quick:
        given.draws, given.sigmas, given.forward = 3, (0.5,), given.forward / 2
    settings = Settings(
        tuple(given.schedules), tuple(given.sigmas), given.ranks, given.microbatches, given.draws, given.forward / 1e3
    )
    record = Record()
    cases = [(sigma, schedule) for sigma in settings.sigmas for schedule in settings.schedules]
    rows = [row for case in with_bar(cases, "cases") for row in measure(*case, settings)]
    print("\n".join(table(rows, sigma) for sigma in settings.sigmas))
    record.end(given.json, settings=asdict(settings), rows=[asdict(row) for row in rows])


def measure(sigma: float, schedule: str, settings: Settings) -> list[Row]:
    """Every driver of one schedule; each turn has lengths of its own, the same on all ranks and for all drivers."""
    turns = [runs_for(schedule, drawn(sigma, draw, settings), settings) for draw in range(settings.draws)]
    simulated = {driver: tuple(turn[driver].simulated(settings) for turn in turns) for driver in turns[0]}
    limit = SECONDS_TO_START + 3 * sum(map(sum, simulated.values()))
    by_rank: list[dict[str, list[Repeat]]] = run_ranks(repeats_on_rank, settings.ranks, turns, settings, timeout=limit)
    rows = []
    for driver, expected in simulated.items():
        seconds = measured([repeats[driver] for repeats in by_rank])
        held = tuple(turn[driver].held(settings) for turn in turns)
        rows.append(Row(sigma, schedule, driver, seconds, expected, held))
    return rows


def drawn(sigma: float, draw: int, settings: Settings) -> tuple[int, ...]:
    """Log-normal lengths whose mean is that of a microbatch, in rows."""
    generator = random.Random(draw)
    raw = [math.exp(generator.gauss(0.0, sigma)) for _ in range(settings.microbatches)]
    return tuple(max(1, round(length * ROWS * len(raw) / sum(raw))) for length in raw)


def runs_for(name: str, lengths: tuple[int, ...], settings: Settings) -> dict[str, Run]:
    """What the drivers make of one draw of lengths."""
    graph, costs, count = graph_for(name, settings.ranks), settings.costs(name, lengths), len(lengths)
    schedule = pe.build(name, graph, count)
    choice = pe.best_schedule(graph, costs, schedules=[name])
    return {
        PACKED: Run(schedule, lengths),
        BOTH_ENDS: Run(schedule, placed(lengths, smallest_at_both_ends(lengths))),
        PLANNED: Run(schedule, lengths, "planned"),
        CHOSEN: Run(choice.schedule, placed(lengths, choice.order)),
        PADDED: Run(schedule, (max(lengths),) * count),
        EQUAL: Run(schedule, (-(-sum(lengths) // count),) * count),
    }


def placed(lengths: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    return tuple(lengths[number] for number in order)


def repeats_on_rank(rank: int, turns: list[dict[str, Run]], settings: Settings) -> dict[str, list[Repeat]]:
    """Every turn on this rank: each driver once."""
    found: dict[str, list[Repeat]] = {}
    for runs in turns:
        for driver, run in runs.items():
            kind = SleepingInTwo if driver in (PADDED, EQUAL) and run.schedule.name == "zb-v" else Sleeping
            stages = {stage: kind(WIDTH) for stage in run.schedule.graph.stages_of(rank)}
            inputs = [torch.zeros(length, WIDTH) for length in run.lengths]
            with step_of(driver, run, stages, inputs) as step:
                warm_up(step, stages, sum(run.lengths), times=2)
                each = settings.forward / len(stages)
                for stage in stages.values():
                    stage.naps = Naps(each, each, each, rows=ROWS)
                found.setdefault(driver, []).append(timed(step, stages))
    return found


@contextmanager
def step_of(driver: str, run: Run, stages: dict[int, Sleeping], inputs: list[Tensor]) -> Iterator[Step]:
    graph = run.schedule.graph
    if driver in (PADDED, EQUAL):
        yield torch_step(
            stages,
            num_stages=graph.num_stages,
            schedule=run.schedule.name,
            inputs=inputs,
            targets=torch.zeros(sum(run.lengths)),
            loss=lambda outputs, _: loss_of(outputs),
        )
        return
    with pe.Pipeline(
        stages, graph=graph, schedule=run.schedule, transport=pe.TorchTransport(), order=run.order, deadline=60.0
    ) as pipeline:
        yield streaming(pipeline, inputs)


def table(rows: list[Row], sigma: float) -> str:
    """A line for each schedule and driver; ratios are those to torch with padding in the same turn."""
    rows = [row for row in rows if row.sigma == sigma]
    padded = {row.schedule: row for row in rows if row.driver == PADDED}
    lines = []
    for row in rows:
        beside = padded[row.schedule]
        over = (ratios(row.measured, beside.measured), ratios(row.simulated, beside.simulated))
        seconds, held = (f"{statistics.median(each):.2f}" for each in (row.measured, row.held))
        lines.append((row.schedule, row.driver, f"{seconds} s", *over, held))
    heads = ["schedule", "microbatches", "step", "over padded", "the same, simulated", "held"]
    return f"sigma {sigma:g}:\n\n{markdown(heads, lines)}\n"


if __name__ == "__main__":
    main()
