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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict, frozen
from torch import Tensor

import pipeline_engine as pe
from pipeline_engine.launch import run_ranks
from benchmarks.sleeping import Sleeping
from benchmarks.torch_peer import torch_step

SCHEDULES = ("gpipe", "1f1b")
ENGINE_DRIVERS = ("stream", "step")
PEER_DRIVERS = ("torch", "alone")
DRIVERS = ENGINE_DRIVERS + PEER_DRIVERS
ROWS, WIDTH = 4, 64
WARM_UPS = 5
SECONDS_TO_START = 60.0

Step = Callable[[], None]
Span = tuple[float, float]
Key = tuple[str, str, str]  # load, schedule, driver


@frozen
class Settings:
    """What is measured; times in seconds."""

    drivers: tuple[str, ...]
    sleeping_repeats: int
    empty_repeats: int
    ranks: tuple[int, ...] = (2, 4)
    microbatches: int = 16
    forward: float = 0.02
    backward: float = 0.04

    def simulated(self, key: Key, ranks: int) -> float:
        """Makespan of one step if nothing but the sleeping took time."""
        load, schedule, driver = key
        if load == "empty":
            return 0.0
        if driver == "alone":
            return self.microbatches * (self.forward + self.backward)
        costs = pe.Costs(forward=self.forward, backward_input=self.backward / 2, backward_weight=self.backward / 2)
        return pe.simulate(pe.build(schedule, chain(ranks), num_microbatches=self.microbatches), costs).makespan


@frozen
class Row:
    """One driver of one schedule under one load: ``makespans`` by repeat and ``simulated``, in seconds."""

    load: str
    schedule: str
    driver: str
    ranks: int
    simulated: float
    makespans: tuple[float, ...]

    def spread(self, unit: float) -> list[float]:
        """Median, least and greatest makespan in units of ``unit`` seconds."""
        return [pick(self.makespans) / unit for pick in (statistics.median, min, max)]


def chain(ranks: int) -> pe.StageGraph:
    return pe.StageGraph.chain(stages=ranks, ranks=ranks, placement="straight")


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.sum()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.caller_owned_loss", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats: within 90 seconds on two cores")
    parser.add_argument(
        "--only", nargs="+", choices=DRIVERS, default=DRIVERS, metavar="DRIVER", help=", ".join(DRIVERS)
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every makespan as data")
    options = parser.parse_args()
    repeats = (3, 20) if options.quick else (11, 100)
    settings = Settings(tuple(options.only), *repeats)
    before = environment()
    rows = [row for ranks in settings.ranks for row in measure(ranks, settings)]
    print(table(rows, settings))
    print(", ".join(f"{name} {value}" for name, value in before.items()))
    if options.json:
        data = {"environment": before, "settings": asdict(settings), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(data, indent=2) + "\n")


def measure(ranks: int, settings: Settings) -> list[Row]:
    repeats = settings.sleeping_repeats + settings.empty_repeats
    limit = SECONDS_TO_START + 4 * repeats * len(settings.drivers)
    spans_by_rank: list[dict[Key, list[Span]]] = run_ranks(spans_on_rank, ranks, ranks, settings, timeout=limit)
    return [
        Row(*key, ranks, settings.simulated(key, ranks), makespans([spans[key] for spans in spans_by_rank]))
        for key in spans_by_rank[0]
    ]


def makespans(spans_by_rank: list[list[Span]]) -> tuple[float, ...]:
    """From the first rank's start to the last rank's end; the clock is one for all processes of a machine."""
    return tuple(
        max(end for _, end in repeat) - min(start for start, _ in repeat) for repeat in zip(*spans_by_rank, strict=True)
    )


def spans_on_rank(rank: int, ranks: int, settings: Settings) -> dict[Key, list[Span]]:
    """Start and end of every repeat on this rank; drivers take turns."""
    stage = Sleeping(WIDTH)
    inputs = list(torch.zeros(settings.microbatches, ROWS, WIDTH))
    loads = {
        "empty": (settings.empty_repeats, 0.0, 0.0),
        "sleeping": (settings.sleeping_repeats, settings.forward, settings.backward),
    }
    spans: dict[Key, list[Span]] = {}
    for schedule in SCHEDULES:
        with drivers_of(schedule, rank, ranks, stage, inputs, settings.drivers) as drivers:
            for step in drivers.values():
                warm_up(step, stage, len(inputs))
            for load, (repeats, stage.forward_seconds, stage.backward_seconds) in loads.items():
                for _ in range(repeats):
                    for driver, step in drivers.items():
                        spans.setdefault((load, schedule, driver), []).append(timed(step))
            stage.forward_seconds = stage.backward_seconds = 0.0
    return spans


def warm_up(step: Step, stage: Sleeping, microbatches: int) -> None:
    """The first backward of a process and the first message of a channel are slow; and what is timed must be right."""
    for _ in range(WARM_UPS):
        stage.bias.grad = None
        step()
        gradient = stage.bias.grad
        if gradient is None or not torch.equal(gradient, torch.full_like(gradient, ROWS * microbatches)):
            raise AssertionError(f"gradient of a sum over {ROWS * microbatches} rows is {gradient}")


def timed(step: Step) -> Span:
    dist.barrier()
    start = time.perf_counter()
    step()
    return start, time.perf_counter()


@contextmanager
def drivers_of(
    schedule: str, rank: int, ranks: int, stage: Sleeping, inputs: list[Tensor], wanted: tuple[str, ...]
) -> Iterator[dict[str, Step]]:
    """The steps to time, by driver, each over all ``inputs``."""
    steps: dict[str, Step] = {}
    with ExitStack() as stack:
        if set(wanted) & set(ENGINE_DRIVERS):
            transport = pe.TorchTransport()
            pipeline = pe.Pipeline(
                {rank: stage}, graph=chain(ranks), schedule=schedule, transport=transport, deadline=60.0
            )
            steps |= engine_steps(stack.enter_context(pipeline), inputs)
        peer = torch_step(stage, rank=rank, ranks=ranks, schedule=schedule, inputs=inputs, loss=loss_of)
        steps |= {"torch": peer, "alone": lambda: run_alone(stage, inputs)}
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


def run_alone(stage: Sleeping, inputs: list[Tensor]) -> None:
    for hidden in inputs:
        loss_of(stage(hidden)).backward()


def table(rows: list[Row], settings: Settings) -> str:
    """Both loads as text; an action is the forward or the backward of one microbatch."""
    actions = 2 * settings.microbatches
    place = "{0.ranks:>5} {0.schedule:>9} {0.driver:>8}".format
    sleeping = [
        f"{place(row)} {row.simulated:10.3f} {statistics.median(row.makespans):9.3f}"
        + "".join(f" {figure:8.3f}" for figure in row.spread(row.simulated))
        for row in rows
        if row.load == "sleeping"
    ]
    empty = [
        place(row) + "".join(f" {figure:8.1f}" for figure in row.spread(actions / 1e6))
        for row in rows
        if row.load == "empty"
    ]
    head = f"{'ranks':>5} {'schedule':>9} {'driver':>8}"
    nominal = f"{settings.forward * 1e3:g} ms forward, {settings.backward * 1e3:g} ms backward"
    return "\n".join(
        [
            f"sleeping stages, {nominal}, {settings.microbatches} microbatches: makespan measured over simulated",
            f"{head} {'simulated':>10} {'measured':>9} {'median':>8} {'least':>8} {'most':>8}",
            *sleeping,
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
