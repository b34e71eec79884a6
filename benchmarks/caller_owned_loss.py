"""What the engine adds to a schedule when the caller owns the loss: ``python -m benchmarks.caller_owned_loss``.

Two loads. Sleeping stages: the makespan measured over the makespan simulated. Empty stages: the same steps with nothing
to do, in microseconds per action. Four drivers under each: the caller's own loop (``Pipeline.stream``), the closed loop
(``Pipeline.step``), the same schedule in torch, and every rank alone without any pipeline.

The page is caller_owned_loss.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict, frozen
from torch import Tensor

import pipeline_engine as pe
from benchmarks.bound import bound
from benchmarks.sleeping import Sleeping
from benchmarks.torch_peer import torch_step
from pipeline_engine.launch import run_ranks
from pipeline_engine.plan.actions import Action, Backward, Forward
from pipeline_engine.plan.graph import Placement

ENGINE_DRIVERS = ("stream", "step")
PEER_DRIVERS = ("torch", "alone")
DRIVERS = ENGINE_DRIVERS + PEER_DRIVERS
PLACEMENTS: dict[str, tuple[int, Placement]] = {  # stages a rank, where they stand
    "gpipe": (1, "straight"),
    "1f1b": (1, "straight"),
    "interleaved": (2, "looped"),
    "looped-bfs": (2, "looped"),
}
ROWS, WIDTH = 4, 64
WARM_UPS = 5
SECONDS_TO_START = 60.0

Step = Callable[[], None]
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
        share = PLACEMENTS[schedule][0]
        half = self.backward / 2 / share
        costs = pe.Costs(forward=self.forward / share, backward_input=half, backward_weight=half)
        return pe.simulate(self.planned(schedule, ranks), costs).makespan

    def planned(self, schedule: str, ranks: int) -> pe.Schedule:
        """The schedule that is run."""
        return pe.build(schedule, graph_for(schedule, ranks), num_microbatches=self.microbatches)


@frozen
class Repeat:
    """One step on one rank: when it began and ended, and what each forward and backward of each stage took."""

    start: float
    end: float
    forwards: dict[int, list[float]]
    backwards: dict[int, list[float]]


@frozen
class Row:
    """One driver of one schedule under one load, in seconds.

    Attributes:
        makespans: measured, by repeat.
        bounds: by repeat, the makespan of actions that take what they took in that repeat, and of nothing else.
        simulated: the makespan of actions that take what they should take.
    """

    load: str
    schedule: str
    driver: str
    ranks: int
    simulated: float
    makespans: tuple[float, ...]
    bounds: tuple[float, ...]

    def spread(self, unit: float) -> list[float]:
        """Median, least and greatest makespan in units of ``unit`` seconds."""
        return [pick(self.makespans) / unit for pick in (statistics.median, min, max)]

    @property
    def share(self) -> float:
        """What the engine adds to the bound, in per cent; the median over the repeats."""
        return 100 * statistics.median(m / b - 1 for m, b in zip(self.makespans, self.bounds, strict=True))


def graph_for(schedule: str, ranks: int) -> pe.StageGraph:
    share, placement = PLACEMENTS[schedule]
    return pe.StageGraph.chain(stages=share * ranks, ranks=ranks, placement=placement)


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.sum()


def main() -> None:
    options = parser().parse_args()
    repeats = (3, 20) if options.quick else (options.repeats, 100)
    settings = Settings(
        tuple(options.only),
        tuple(options.schedules),
        *repeats,
        ranks=tuple(options.ranks),
        microbatches=options.microbatches,
        forward=options.forward / 1e3,
        backward=options.backward / 1e3,
    )
    before = environment()
    rows = [row for ranks in settings.ranks for row in measure(ranks, settings)]
    print(table(rows, settings))
    print(", ".join(f"{name} {value}" for name, value in before.items()))
    if options.json:
        data = {"environment": before, "settings": asdict(settings), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(data, indent=2) + "\n")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.caller_owned_loss", description=__doc__.splitlines()[0])
    made.add_argument("--quick", action="store_true", help="fewer repeats: within 90 seconds on two cores")
    made.add_argument("--only", nargs="+", choices=DRIVERS, default=DRIVERS, metavar="DRIVER", help=", ".join(DRIVERS))
    made.add_argument("--schedules", nargs="+", choices=PLACEMENTS, default=("gpipe", "1f1b"), metavar="SCHEDULE")
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
    """The clock is one for all processes of a machine: from the first rank's start to the last rank's end."""
    _, schedule, driver = key
    steps = list(zip(*by_rank, strict=True))
    makespans = tuple(max(each.end for each in step) - min(each.start for each in step) for step in steps)
    planned = settings.planned(schedule, ranks)
    bounds = tuple(max(map(busy, step)) if driver == "alone" else bound(planned, seconds_of(step)) for step in steps)
    return Row(*key, ranks, settings.simulated(key, ranks), makespans, bounds)


def busy(step: Repeat) -> float:
    return sum(map(sum, (*step.forwards.values(), *step.backwards.values())))


def seconds_of(step: Iterable[Repeat]) -> dict[Action, float]:
    """What each action of a schedule took; the microbatches of a stage come in order."""
    seconds: dict[Action, float] = {}
    for rank in step:
        for stage, durations in rank.forwards.items():
            seconds |= {Forward(stage, m): duration for m, duration in enumerate(durations)}
        for stage, durations in rank.backwards.items():
            seconds |= {Backward(stage, m): duration for m, duration in enumerate(durations)}
    return seconds


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
                warm_up(step, stages, len(inputs))
            for load, (repeats, forward, backward) in loads.items():
                for stage in stages.values():
                    stage.forward_seconds, stage.backward_seconds = forward / len(stages), backward / len(stages)
                for _ in range(repeats):
                    for driver, step in drivers.items():
                        found.setdefault((load, schedule, driver), []).append(timed(step, stages))
    return found


def warm_up(step: Step, stages: Mapping[int, Sleeping], microbatches: int) -> None:
    """The first backward of a process and the first message of a channel are slow; and what is timed must be right."""
    for _ in range(WARM_UPS):
        for stage in stages.values():
            stage.bias.grad = None
        step()
        for stage in stages.values():
            gradient = stage.bias.grad
            if gradient is None or not torch.equal(gradient, torch.full_like(gradient, ROWS * microbatches)):
                raise AssertionError(f"gradient of a sum over {ROWS * microbatches} rows is {gradient}")


def timed(step: Step, stages: Mapping[int, Sleeping]) -> Repeat:
    for stage in stages.values():
        stage.forwards, stage.backwards = [], []
    dist.barrier()
    start = time.perf_counter()
    step()
    end = time.perf_counter()
    forwards = {number: stage.forwards for number, stage in stages.items()}
    backwards = {number: stage.backwards for number, stage in stages.items()}
    return Repeat(start, end, forwards, backwards)


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


def engine_steps(pipeline: pe.Pipeline, inputs: list[Tensor]) -> dict[str, Step]:
    data = [pe.Microbatch(inputs=(hidden,)) for hidden in inputs]

    def stream() -> None:
        for item in pipeline.stream(data):
            loss_of(item.outputs).backward()
        pipeline.flush()

    def step() -> None:
        pipeline.step(data, lambda outputs, index: loss_of(outputs))

    return {"stream": stream, "step": step}


def run_alone(stages: Mapping[int, Sleeping], inputs: list[Tensor]) -> None:
    for hidden in inputs:
        for stage in stages.values():
            loss_of(stage(hidden)).backward()


def table(rows: list[Row], settings: Settings) -> str:
    """Both loads as text; an action is the forward or the backward of one microbatch."""
    actions = 2 * settings.microbatches
    place = "{0.ranks:>5} {0.schedule:>11} {0.driver:>8}".format
    sleeping = [
        f"{place(row)} {row.simulated:10.3f} {statistics.median(row.makespans):9.3f}"
        + "".join(f" {figure:8.3f}" for figure in row.spread(row.simulated))
        + f" {row.share:7.2f} %"
        for row in rows
        if row.load == "sleeping"
    ]
    empty = [
        place(row) + "".join(f" {figure:8.1f}" for figure in row.spread(actions / 1e6))
        for row in rows
        if row.load == "empty"
    ]
    head = f"{'ranks':>5} {'schedule':>11} {'driver':>8}"
    nominal = f"{settings.forward * 1e3:g} ms forward, {settings.backward * 1e3:g} ms backward"
    return "\n".join(
        [
            f"sleeping stages, {nominal}, {settings.microbatches} microbatches: makespan measured over simulated",
            f"{head} {'simulated':>10} {'measured':>9} {'median':>8} {'least':>8} {'most':>8} {'engine':>9}",
            *sleeping,
            "engine: what is added to the bound of the times that the stages' own code took in that repeat",
            "",
            f"empty stages, {settings.microbatches} microbatches: microseconds per action, {actions} actions per rank",
            f"{head} {'median':>8} {'least':>8} {'most':>8}",
            *empty,
        ]
    )


def environment() -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "backend": "gloo",
    }


if __name__ == "__main__":
    main()
