"""What a schedule holds in memory, here and under torch.distributed.pipelining: ``python -m benchmarks.memory``.

The most bytes that a rank has allocated at once, from the making of the engine to the end of its second step, beside
what the schedule must hold: the activations of each stage and microbatch from its forward to the end of its backward.

The page is memory.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from attrs import asdict, frozen
from torch import Tensor, nn

import pipeline_engine as pe
from art_adapter.progress import with_bar
from benchmarks.allocations import counted
from benchmarks.record import Record
from benchmarks.steps import graph_for
from benchmarks.tables import markdown, ratios, spread
from benchmarks.torch_peer import torch_text_step
from benchmarks.transformer import Shape, cut, next_token_loss, text
from pipeline_engine.launch import run_ranks
from pipeline_engine.plan.actions import Backward, BackwardWeight, Forward

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-v")
STEPS = 2
MIB = 2**20

Step = Callable[[], object]


@frozen
class Case:
    """One schedule over so many microbatches."""

    schedule: str
    ranks: int
    microbatches: int

    def planned(self) -> pe.Schedule:
        graph = graph_for(self.schedule, self.ranks)
        return pe.build(self.schedule, graph, num_microbatches=self.microbatches)


@frozen
class Settings:
    """What is measured."""

    cases: tuple[Case, ...]
    repeats: int
    shape: Shape


@frozen
class Held:
    """Bytes on one rank in one case.

    Attributes:
        activation: what the smallest stage of the rank holds for one microbatch.
        theory: activations of the schedule's fullest moment.
        peaks: measured, by driver and repeat.
    """

    activation: int
    theory: int
    peaks: dict[str, list[int]]


def main() -> None:
    options = parser().parse_args()
    record = Record()
    microbatches = (8,) if options.quick else tuple(options.microbatches)
    found = []
    for ranks in with_bar(options.ranks, "numbers of ranks"):
        cases = tuple(Case(name, ranks, count) for name in options.schedules for count in microbatches)
        settings = Settings(cases, 2 if options.quick else options.repeats, Shape(8, 128, 4, 256, options.tokens))
        by_rank = run_ranks(held_on_rank, ranks, settings, timeout=600.0)
        for case, held in zip(cases, zip(*by_rank, strict=True), strict=True):
            found.append((case, held))
    print(table(found), end="\n\n")
    record.end(options.json, measured=[{**asdict(case), "ranks": list(map(asdict, held))} for case, held in found])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__.splitlines()[0])
    made.add_argument("--quick", action="store_true", help="8 microbatches, 2 repeats: within 90 seconds")
    made.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES, metavar="SCHEDULE")
    made.add_argument("--ranks", nargs="+", type=int, default=(2, 4), metavar="P")
    made.add_argument("--microbatches", nargs="+", type=int, default=(8, 32), metavar="M")
    made.add_argument("--tokens", type=int, default=128, help="of a microbatch")
    made.add_argument("--repeats", type=int, default=3, metavar="N")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every figure as data")
    return made


def held_on_rank(rank: int, settings: Settings) -> list[Held]:
    """For each case what this rank should hold, and what it held; drivers take turns."""
    return [held_in(case, rank, settings) for case in settings.cases]


def held_in(case: Case, rank: int, settings: Settings) -> Held:
    schedule = case.planned()
    parts = cut(settings.shape, schedule.graph.num_stages)
    stages = {number: parts[number] for number in schedule.graph.stages_of(rank)}
    rows = text(settings.shape, case.microbatches)
    for stage in stages.values():
        for parameter in stage.parameters():
            parameter.grad = torch.zeros_like(parameter)
    activations = {number: activation(number, stage, settings.shape) for number, stage in stages.items()}
    peaks: dict[str, list[int]] = {}
    for _ in range(settings.repeats):
        for driver, made in DRIVERS.items():
            dist.barrier()
            with counted() as allocated, made(case.schedule, schedule.graph, stages, rows) as step:
                for _ in range(STEPS):
                    step()
            peaks.setdefault(driver, []).append(allocated.peak)
    return Held(min(activations.values()), in_flight(schedule, rank, activations), peaks)


def activation(number: int, stage: nn.Module, shape: Shape) -> int:
    """Bytes that a forward leaves for its backward, with what the stage received and returned."""
    with counted() as allocated:
        hidden = torch.zeros(1, shape.tokens, shape.hidden, requires_grad=True)
        received = hidden if number else text(shape, 1)[0]
        kept = stage(received)
    del kept
    return allocated.left


def in_flight(schedule: pe.Schedule, rank: int, activations: Mapping[int, int]) -> int:
    """Bytes that a rank holds at its fullest moment if it holds activations alone.

    Args:
        schedule: computing verbs.
        rank: whose.
        activations: bytes of one microbatch by stage.
    """
    held = most = 0
    for action in schedule.programs[rank]:
        match action:
            case Forward(stage, _):
                held += activations[stage]
            case Backward(stage, _) | BackwardWeight(stage, _):
                held -= activations[stage]
        most = max(most, held)
    return most


@contextmanager
def pipeline_of(schedule: str, graph: pe.StageGraph, stages: dict[int, nn.Module]) -> Iterator[pe.Pipeline]:
    transport = pe.TorchTransport()
    with pe.Pipeline(stages, graph=graph, schedule=schedule, transport=transport, deadline=120.0) as pipeline:
        yield pipeline


@contextmanager
def stream(schedule: str, graph: pe.StageGraph, stages: dict[int, nn.Module], rows: list[Tensor]) -> Iterator[Step]:
    data = [pe.Microbatch(inputs=(row,)) for row in rows]

    with pipeline_of(schedule, graph, stages) as pipeline:

        def step() -> None:
            for item in pipeline.stream(data):
                next_token_loss(item.outputs, rows[item.index]).backward()
            pipeline.flush()

        yield step


@contextmanager
def closed(schedule: str, graph: pe.StageGraph, stages: dict[int, nn.Module], rows: list[Tensor]) -> Iterator[Step]:
    data = [pe.Microbatch(inputs=(row,)) for row in rows]
    with pipeline_of(schedule, graph, stages) as pipeline:
        yield lambda: pipeline.step(data, lambda logits, index: next_token_loss(logits, rows[index]))


@contextmanager
def peer(schedule: str, graph: pe.StageGraph, stages: dict[int, nn.Module], rows: list[Tensor]) -> Iterator[Step]:
    yield torch_text_step(stages, graph, schedule, rows)


DRIVERS = {"stream": stream, "step": closed, "torch": peer}


def table(found: list[tuple[Case, tuple[Held, ...]]]) -> str:
    """A line for each case: MiB of the fullest rank, and how ranks compare with the schedule and with torch."""
    heads = ["ranks", "microbatches", "schedule", "the schedule's own", *(f"{driver}, MiB" for driver in DRIVERS)]
    for driver in ("stream", "step"):
        heads += [f"`{driver}` / schedule", f"`{driver}` / torch", f"`{driver}` / torch, by rank"]
    return markdown(heads, (_line(case, by_rank) for case, by_rank in found))


def _line(case: Case, by_rank: tuple[Held, ...]) -> list[str]:
    theory = max(held.theory for held in by_rank)
    fullest = {
        driver: [max(repeat) for repeat in zip(*(held.peaks[driver] for held in by_rank), strict=True)]
        for driver in DRIVERS
    }
    line = [str(case.ranks), str(case.microbatches), case.schedule, f"{theory / MIB:.2f}"]
    line += [spread([peak / MIB for peak in fullest[driver]], 2) for driver in DRIVERS]
    for driver in ("stream", "step"):
        by_each = [a / b for held in by_rank for a, b in zip(held.peaks[driver], held.peaks["torch"], strict=True)]
        line += [spread([peak / theory for peak in fullest[driver]]), ratios(fullest[driver], fullest["torch"])]
        line.append(f"{min(by_each):.3f}-{max(by_each):.3f}")
    return line


if __name__ == "__main__":
    main()
