"""What the engine adds to a schedule when the caller owns the loss: ``python -m benchmarks.caller_owned_loss``.

Two loads. Sleeping stages: the makespan measured over the makespan simulated. Empty stages: the same steps with nothing
to do, in microseconds per action. Four drivers under each: the caller's own loop (``Pipeline.stream``), the closed loop
(``Pipeline.step``), the same schedule in torch, and every rank alone without any pipeline.

The page is caller_owned_loss.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from attrs import asdict, frozen
from torch import Tensor

import pipeline_engine as pe
from benchmarks.record import Record
from benchmarks.sleeping import Naps, Sleeping
from benchmarks.steps import (
    ROWS,
    SECONDS_TO_START,
    WIDTH,
    Makespans,
    Repeat,
    Step,
    bound_of_step,
    engine_steps,
    graph_for,
    loss_of,
    timed,
    warm_up,
)
from benchmarks.tables import markdown, spread
from benchmarks.torch_peer import torch_step
from pipeline_engine.launch import run_ranks

ENGINE_DRIVERS = ("stream", "step")
PEER_DRIVERS = ("torch", "alone")
DRIVERS = ENGINE_DRIVERS + PEER_DRIVERS
SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs")

Key = tuple[str, str, str]  # load, schedule, driver


@frozen
class Settings:
    """What is measured; times in seconds, those of a rank being spread evenly over its stages."""

    drivers: tuple[str, ...]
    schedules: tuple[str, ...]
    sleeping_repeats: int
    empty_repeats: int
    ranks: tuple[int, ...]
    microbatches: int
    forward: float
    backward: float

    def simulated(self, key: Key, ranks: int) -> float:
        """Makespan of one step if nothing but the sleeping took time."""
        load, schedule, driver = key
        if load == "empty":
            return 0.0
        if driver == "alone":
            return self.microbatches * (self.forward + self.backward)
        planned = self.planned(schedule, ranks)
        share = len(planned.graph.stages_of(0))
        half = self.backward / 2 / share
        costs = pe.Costs(forward=self.forward / share, backward_input=half, backward_weight=half)
        return pe.simulate(planned, costs).makespan

    def planned(self, schedule: str, ranks: int) -> pe.Schedule:
        """The schedule that is run."""
        return pe.build(schedule, graph_for(schedule, ranks), num_microbatches=self.microbatches)


@frozen
class Row:
    """One driver of one schedule under one load; ``simulated``: seconds if actions took what they should take."""

    load: str
    schedule: str
    driver: str
    ranks: int
    simulated: float
    makespans: Makespans

    def spread(self, unit: float, decimals: int) -> str:
        """Median, least and most in units of ``unit`` seconds."""
        return spread([each / unit for each in self.makespans.measured], decimals)


def main() -> None:
    options = parser().parse_args()
    sleeping_repeats, empty_repeats = (3, 20) if options.quick else (options.repeats, 100)
    settings = Settings(
        tuple(options.only),
        tuple(options.schedules),
        sleeping_repeats,
        empty_repeats,
        ranks=tuple(options.ranks),
        microbatches=options.microbatches,
        forward=options.forward / 1e3,
        backward=options.backward / 1e3,
    )
    record = Record()
    rows = [row for ranks in settings.ranks for row in measure(ranks, settings)]
    print(tables(rows, settings))
    record.end(options.json, settings=asdict(settings), rows=[asdict(row) for row in rows])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.caller_owned_loss", description=__doc__.splitlines()[0])
    made.add_argument("--quick", action="store_true", help="fewer repeats: within 90 seconds on two cores")
    made.add_argument("--only", nargs="+", choices=DRIVERS, default=DRIVERS, metavar="DRIVER", help=", ".join(DRIVERS))
    made.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=("gpipe", "1f1b"), metavar="SCHEDULE")
    made.add_argument("--ranks", nargs="+", type=int, default=(2, 4), metavar="P")
    made.add_argument("--microbatches", type=int, default=16, metavar="M")
    made.add_argument("--forward", type=float, default=20.0, metavar="MS", help="forward of a rank, milliseconds")
    made.add_argument("--backward", type=float, default=40.0, metavar="MS", help="backward of a rank, milliseconds")
    made.add_argument("--repeats", type=int, default=11, metavar="N", help="of sleeping steps")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every makespan as data")
    return made


def measure(ranks: int, settings: Settings) -> list[Row]:
    repeats = settings.sleeping_repeats + settings.empty_repeats
    limit = SECONDS_TO_START + 4 * repeats * len(settings.drivers) * len(settings.schedules)
    by_rank: list[dict[Key, list[Repeat]]] = run_ranks(repeats_on_rank, ranks, ranks, settings, timeout=limit)
    return [row_of(key, ranks, settings, [repeats[key] for repeats in by_rank]) for key in by_rank[0]]


def row_of(key: Key, ranks: int, settings: Settings, by_rank: list[list[Repeat]]) -> Row:
    planned = settings.planned(key[1], ranks)

    def bound_of(step: Sequence[Repeat]) -> float:
        return max(map(busy, step)) if key[2] == "alone" else bound_of_step(planned, step)

    return Row(*key, ranks, settings.simulated(key, ranks), Makespans.of(by_rank, bound_of))


def busy(step: Repeat) -> float:
    return sum(sum(naps) for took in step.took.values() for naps in took.values())


def repeats_on_rank(rank: int, ranks: int, settings: Settings) -> dict[Key, list[Repeat]]:
    """Every repeat on this rank; drivers take turns."""
    inputs = list(torch.zeros(settings.microbatches, ROWS, WIDTH))
    loads = {
        "empty": (settings.empty_repeats, 0.0, 0.0),
        "sleeping": (settings.sleeping_repeats, settings.forward, settings.backward),
    }
    found: dict[Key, list[Repeat]] = {}
    for schedule in settings.schedules:
        graph = graph_for(schedule, ranks)
        stages = {stage: Sleeping(WIDTH) for stage in graph.stages_of(rank)}
        with drivers_of(schedule, graph, stages, inputs, settings.drivers) as drivers:
            for step in drivers.values():
                warm_up(step, stages, ROWS * len(inputs))
            for load, (repeats, forward, backward) in loads.items():
                for stage in stages.values():
                    half = backward / 2 / len(stages)
                    stage.naps = Naps(forward / len(stages), half, half)
                for _ in range(repeats):
                    for driver, step in drivers.items():
                        found.setdefault((load, schedule, driver), []).append(timed(step, stages))
    return found


@contextmanager
def drivers_of(
    schedule: str, graph: pe.StageGraph, stages: dict[int, Sleeping], inputs: list[Tensor], wanted: tuple[str, ...]
) -> Iterator[dict[str, Step]]:
    """The steps to time, by driver, each over all ``inputs``."""
    steps: dict[str, Step] = {}
    with ExitStack() as stack:
        if set(wanted) & set(ENGINE_DRIVERS):
            pipeline = pe.Pipeline(stages, graph=graph, schedule=schedule, transport=pe.TorchTransport(), deadline=60.0)
            steps |= engine_steps(stack.enter_context(pipeline), inputs)
        peer = torch_step(
            stages,
            num_stages=graph.num_stages,
            schedule=schedule,
            inputs=inputs,
            targets=torch.zeros(len(inputs) * ROWS),
            loss=lambda outputs, _: loss_of(outputs),
        )
        steps |= {"torch": peer, "alone": lambda: run_alone(stages, inputs)}
        yield {driver: steps[driver] for driver in wanted}


def run_alone(stages: Mapping[int, Sleeping], inputs: list[Tensor]) -> None:
    for hidden in inputs:
        for stage in stages.values():
            loss_of(stage(hidden)).backward()


def tables(rows: list[Row], settings: Settings) -> str:
    """Both loads; an action is the forward or the backward of one microbatch."""
    actions = 2 * settings.microbatches
    nominal = f"{settings.forward * 1e3:g} ms forward, {settings.backward * 1e3:g} ms backward"
    sleeping = [
        (*place(row), f"{row.simulated:.3f} s", row.spread(row.simulated, 3), f"{row.makespans.share:.1f} %")
        for row in rows
        if row.load == "sleeping"
    ]
    empty = [(*place(row), row.spread(actions / 1e6, 0)) for row in rows if row.load == "empty"]
    heads = ["ranks", "schedule", "driver"]
    return "\n".join(
        [
            f"Sleeping stages, {nominal}, {settings.microbatches} microbatches: measured over simulated.\n",
            markdown([*heads, "simulated", "over simulated", "engine"], sleeping),
            "\nEngine: what is added to the bound of the times that the stages' own code took in that repeat.",
            f"\nEmpty stages: microseconds per action, {actions} actions per rank.\n",
            markdown([*heads, "microseconds"], empty) + "\n",
        ]
    )


def place(row: Row) -> tuple[str, str, str]:
    return str(row.ranks), row.schedule, row.driver


if __name__ == "__main__":
    main()
