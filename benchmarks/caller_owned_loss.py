"""What the engine adds to a schedule when the caller owns the loss: ``python -m benchmarks.caller_owned_loss``.

Stages sleep for known seconds; the makespan measured is put over the makespan simulated, and over the bound of what the
actions took in that step. Five drivers: the caller's own loop (``Pipeline.stream``), the closed loop
(``Pipeline.step``), the same schedule in torch, 1F1B written by hand, and every rank alone without any pipeline.

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
from benchmarks.by_hand import step_by_hand
from benchmarks.plans import chosen, rows_of
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
    timed_in_turns,
    warm_up,
)
from benchmarks.tables import markdown, spread
from benchmarks.torch_peer import torch_step
from pipeline_engine.launch import run_ranks

ENGINE_DRIVERS = ("stream", "step")
PEER_DRIVERS = ("torch", "hand", "alone")
DRIVERS = ENGINE_DRIVERS + PEER_DRIVERS
SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs")

Key = tuple[str, str]  # schedule, driver


@frozen
class Settings:
    """What is measured; times in seconds, those of a rank being spread evenly over its stages."""

    drivers: tuple[str, ...]
    schedules: tuple[str, ...]
    repeats: int
    ranks: tuple[int, ...]
    microbatches: int
    forward: float
    backward: float
    awake: bool = False

    def simulated(self, key: Key, ranks: int) -> float:
        """Makespan of one step if nothing but the sleeping took time."""
        schedule, driver = key
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


BOTH = ("1f1b", "interleaved")
FEW_DRIVERS = ("stream", "torch", "hand")
FULL = (
    Settings(DRIVERS, BOTH, repeats=7, ranks=(2, 4, 8), microbatches=16, forward=0.02, backward=0.04),
    Settings(
        ("stream", "torch", "hand"), BOTH, repeats=7, ranks=(2, 4, 8), microbatches=32, forward=0.02, backward=0.04
    ),
    Settings(FEW_DRIVERS, BOTH, repeats=7, ranks=(4, 8), microbatches=16, forward=0.05, backward=0.1),
    Settings(DRIVERS, BOTH, repeats=7, ranks=(2,), microbatches=16, forward=0.02, backward=0.04, awake=True),
)
QUICK = (Settings(DRIVERS, ("1f1b",), repeats=3, ranks=(2, 4), microbatches=16, forward=0.02, backward=0.04),)


@frozen
class Row:
    """One driver of one schedule; ``simulated``: seconds if actions took what they should take."""

    schedule: str
    driver: str
    ranks: int
    simulated: float
    makespans: Makespans


def main() -> None:
    options = vars(parser().parse_args())
    file, record = options.pop("json"), Record()
    found = rows_of(chosen(options, full=FULL, quick=QUICK), measure)
    print("\n".join(table(rows, settings) for settings, rows in found))
    print("Engine: what is added to the bound of the times that the stages' own code took in that repeat.\n")
    record.end(file, runs=[{"settings": asdict(settings), "rows": list(map(asdict, rows))} for settings, rows in found])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.caller_owned_loss",
        description=f"{__doc__.splitlines()[0]} Any option but --quick and --json replaces the plan by one run.",
    )
    made.add_argument("--quick", action="store_true", help="a small plan: within 90 seconds on two cores")
    made.add_argument("--drivers", nargs="+", choices=DRIVERS, metavar="DRIVER", help=", ".join(DRIVERS))
    made.add_argument("--schedules", nargs="+", choices=SCHEDULES, metavar="SCHEDULE")
    made.add_argument("--ranks", nargs="+", type=int, metavar="P")
    made.add_argument("--microbatches", type=int, metavar="M")
    made.add_argument("--forward", type=float, metavar="SECONDS", help="forward of a rank")
    made.add_argument("--backward", type=float, metavar="SECONDS", help="backward of a rank")
    made.add_argument("--awake", action="store_true", default=None, help="compute instead of sleeping: a core a rank")
    made.add_argument("--repeats", type=int, metavar="N")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every makespan as data")
    return made


def measure(settings: Settings, ranks: int) -> list[Row]:
    longest = 2 * (settings.forward + settings.backward) * (settings.microbatches + ranks) + 2
    limit = SECONDS_TO_START + longest * settings.repeats * len(settings.drivers) * len(settings.schedules)
    by_rank: list[dict[Key, list[Repeat]]] = run_ranks(repeats_on_rank, ranks, ranks, settings, timeout=limit)
    return [row_of(key, ranks, settings, [repeats[key] for repeats in by_rank]) for key in by_rank[0]]


def row_of(key: Key, ranks: int, settings: Settings, by_rank: list[list[Repeat]]) -> Row:
    planned = settings.planned(key[0], ranks)

    def bound_of(step: Sequence[Repeat]) -> float:
        return max(map(busy, step)) if key[1] == "alone" else bound_of_step(planned, step)

    return Row(*key, ranks, settings.simulated(key, ranks), Makespans.of(by_rank, bound_of))


def busy(step: Repeat) -> float:
    return sum(sum(naps) for took in step.took.values() for naps in took.values())


def repeats_on_rank(rank: int, ranks: int, settings: Settings) -> dict[Key, list[Repeat]]:
    """Every repeat on this rank; drivers take turns."""
    inputs = list(torch.zeros(settings.microbatches, ROWS, WIDTH))
    found: dict[Key, list[Repeat]] = {}
    for schedule in settings.schedules:
        graph = graph_for(schedule, ranks)
        stages = {stage: Sleeping(WIDTH) for stage in graph.stages_of(rank)}
        with drivers_of(schedule, graph, stages, inputs, settings.drivers) as drivers:
            for step in drivers.values():
                warm_up(step, stages, ROWS * len(inputs))
            for stage in stages.values():
                half = settings.backward / 2 / len(stages)
                stage.naps = Naps(settings.forward / len(stages), half, half, awake=settings.awake)
            turns = timed_in_turns(drivers, stages, settings.repeats)
        found |= {(schedule, driver): repeats for driver, repeats in turns.items()}
    return found


@contextmanager
def drivers_of(
    schedule: str, graph: pe.StageGraph, stages: dict[int, Sleeping], inputs: list[Tensor], wanted: tuple[str, ...]
) -> Iterator[dict[str, Step]]:
    """The steps to time, by driver, each over all ``inputs``; by hand there is 1F1B only."""
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
        if schedule == "1f1b":
            (rank,) = stages
            steps["hand"] = step_by_hand(
                stages[rank], rank=rank, num_ranks=graph.num_ranks, inputs=inputs, loss=loss_of
            )
        yield {driver: steps[driver] for driver in wanted if driver in steps}


def run_alone(stages: Mapping[int, Sleeping], inputs: list[Tensor]) -> None:
    for hidden in inputs:
        for stage in stages.values():
            loss_of(stage(hidden)).backward()


def table(rows: list[Row], settings: Settings) -> str:
    """A line for each driver."""
    nominal = (
        f"{settings.forward * 1e3:g} ms forward, {settings.backward * 1e3:g} ms backward{settings.awake * ', awake'}"
    )
    lines = [
        (
            str(row.ranks),
            row.schedule,
            row.driver,
            f"{row.simulated:.3f} s",
            spread([each / row.simulated for each in row.makespans.measured]),
            f"{row.makespans.share:.1f} %",
        )
        for row in rows
    ]
    heads = ["ranks", "schedule", "driver", "simulated", "over simulated", "engine"]
    return f"{nominal}, {settings.microbatches} microbatches, {settings.repeats} repeats\n\n{markdown(heads, lines)}\n"


if __name__ == "__main__":
    main()
