"""What a split backward gains, and what the engine adds to it: ``python -m benchmarks.zero_bubble``.

Sleeping stages whose forward and both halves of the backward sleep. The makespan of ``zb-h1`` and ``zb-v``, and of
``1f1b`` beside them, over two bounds: that of the nominal times, and that of the times which the actions took in the
same step.

The page is zero_bubble.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict, define, field, frozen
from torch import Tensor, nn

import pipeline_engine as pe
from benchmarks.bound import bound
from benchmarks.caller_owned_loss import ROWS, SECONDS_TO_START, WARM_UPS, WIDTH, Step, engine_steps, environment
from benchmarks.sleeping import nap
from pipeline_engine.launch import run_ranks
from pipeline_engine.plan.actions import Action, Backward, BackwardInput, BackwardWeight, Forward
from pipeline_engine.plan.graph import Placement

PLACEMENTS: dict[str, tuple[int, Placement]] = {  # stages a rank, where they stand
    "1f1b": (1, "straight"),
    "zb-h1": (1, "straight"),
    "zb-v": (2, "vee"),
}
DRIVERS = ("stream", "step")

Key = tuple[str, str]  # schedule, driver
Times = dict[str, list[float]]  # by letter of the verb, in the order of the microbatches


@frozen
class Settings:
    """What is measured; ``seconds`` is each third of a rank's work on a microbatch, spread evenly over its stages."""

    schedules: tuple[str, ...]
    ranks: tuple[int, ...]
    microbatches: int
    seconds: float
    repeats: int

    def planned(self, schedule: str, ranks: int) -> pe.Schedule:
        """The schedule that is run."""
        return pe.build(schedule, graph_for(schedule, ranks), num_microbatches=self.microbatches)

    def nominal(self, schedule: str, ranks: int) -> float:
        """Makespan if every action took what it should take, and nothing else took time."""
        each = self.seconds / PLACEMENTS[schedule][0]
        costs = pe.Costs(forward=each, backward_input=each, backward_weight=each)
        return pe.simulate(self.planned(schedule, ranks), costs).makespan


@define
class Nap:
    """How long a stage sleeps, and how long its halves took."""

    seconds: float = 0.0
    took: Times = field(factory=lambda: {"F": [], "I": [], "W": []})

    def take(self, letter: str) -> None:
        start = time.perf_counter()
        nap(self.seconds)
        self.took[letter].append(time.perf_counter() - start)


@pe.splits_backward(weights=[1])
class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, bias: Tensor, napping: Nap) -> Tensor:
        ctx.napping = napping
        napping.take("F")
        return hidden + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        for_hidden, for_bias = ctx.needs_input_grad[:2]
        if for_hidden:
            ctx.napping.take("I")
        if for_bias:
            ctx.napping.take("W")
        return grads[0] * 1.0 if for_hidden else None, grads[0].sum(0) if for_bias else None, None


class Sleeping(nn.Module):
    """Adds a trained bias and sleeps.  hidden: ``[rows, width]``, float32; it needs a gradient on every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.napping = Nap()

    def forward(self, hidden: Tensor) -> Tensor:
        return _Halves.apply(hidden, self.bias, self.napping)  # type: ignore[no-untyped-call,no-any-return]


@frozen
class Repeat:
    """One step on one rank: when it began and ended, and by stage what its actions took."""

    start: float
    end: float
    took: dict[int, Times]


@frozen
class Row:
    """One driver of one schedule, in seconds; ``makespans`` and ``bounds`` of the measured times by repeat."""

    schedule: str
    driver: str
    ranks: int
    nominal: float
    makespans: tuple[float, ...]
    bounds: tuple[float, ...]

    @property
    def share(self) -> float:
        """What the engine adds to the bound of the measured times, in per cent; the median over the repeats."""
        return 100 * statistics.median(m / b - 1 for m, b in zip(self.makespans, self.bounds, strict=True))


def graph_for(schedule: str, ranks: int) -> pe.StageGraph:
    share, placement = PLACEMENTS[schedule]
    return pe.StageGraph.chain(stages=share * ranks, ranks=ranks, placement=placement)


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m benchmarks.zero_bubble", description=__doc__.splitlines()[0])
    made.add_argument("--schedules", nargs="+", choices=PLACEMENTS, default=tuple(PLACEMENTS), metavar="SCHEDULE")
    made.add_argument("--ranks", nargs="+", type=int, default=(2, 4, 8), metavar="P")
    made.add_argument("--microbatches", type=int, default=16, metavar="M")
    made.add_argument("--milliseconds", type=float, default=20.0, metavar="MS", help="of a rank's F, I and W each")
    made.add_argument("--repeats", type=int, default=5, metavar="N")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every makespan as data")
    options = made.parse_args()
    settings = Settings(
        tuple(options.schedules),
        tuple(options.ranks),
        options.microbatches,
        options.milliseconds / 1e3,
        options.repeats,
    )
    before = environment()
    rows = [row for ranks in settings.ranks for row in measure(ranks, settings)]
    print(table(rows, settings))
    print(", ".join(f"{name} {value}" for name, value in before.items()))
    if options.json:
        data = {"environment": before, "settings": asdict(settings), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(data, indent=2) + "\n")


def measure(ranks: int, settings: Settings) -> list[Row]:
    steps = settings.repeats * len(DRIVERS) * len(settings.schedules)
    longest = 3 * settings.seconds * (settings.microbatches + ranks)
    by_rank: list[dict[Key, list[Repeat]]] = run_ranks(
        repeats_on_rank, ranks, ranks, settings, timeout=SECONDS_TO_START + 2 * steps * longest
    )
    return [row_of(key, ranks, settings, [repeats[key] for repeats in by_rank]) for key in by_rank[0]]


def row_of(key: Key, ranks: int, settings: Settings, by_rank: list[list[Repeat]]) -> Row:
    """The clock is one for all processes of a machine: from the first rank's start to the last rank's end."""
    steps = list(zip(*by_rank, strict=True))
    makespans = tuple(max(each.end for each in step) - min(each.start for each in step) for step in steps)
    planned = settings.planned(key[0], ranks)
    bounds = tuple(bound(planned, seconds_of(step)) for step in steps)
    return Row(*key, ranks, settings.nominal(key[0], ranks), makespans, bounds)


def seconds_of(step: Iterable[Repeat]) -> dict[Action, float]:
    """What each action of a schedule took; the microbatches of a stage come in order."""
    seconds: dict[Action, float] = {}
    for stage, took in (pair for rank in step for pair in rank.took.items()):
        for m, (forward, first, second) in enumerate(zip(took["F"], took["I"], took["W"], strict=True)):
            seconds |= {Forward(stage, m): forward, BackwardInput(stage, m): first, BackwardWeight(stage, m): second}
            seconds[Backward(stage, m)] = first + second
    return seconds


def repeats_on_rank(rank: int, ranks: int, settings: Settings) -> dict[Key, list[Repeat]]:
    """Every repeat on this rank; schedules and drivers take turns."""
    inputs = [hidden.requires_grad_() for hidden in torch.zeros(settings.microbatches, ROWS, WIDTH)]
    found: dict[Key, list[Repeat]] = {}
    for schedule in settings.schedules:
        graph = graph_for(schedule, ranks)
        stages = {stage: Sleeping() for stage in graph.stages_of(rank)}
        with pe.Pipeline(
            stages, graph=graph, schedule=schedule, transport=pe.TorchTransport(), deadline=60.0
        ) as pipeline:
            drivers = engine_steps(pipeline, inputs)
            for step in drivers.values():
                warm_up(step, stages, len(inputs))
            for stage in stages.values():
                stage.napping.seconds = settings.seconds / len(stages)
            for _ in range(settings.repeats):
                for driver, step in drivers.items():
                    found.setdefault((schedule, driver), []).append(timed(step, stages))
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
        stage.napping.took = {"F": [], "I": [], "W": []}
    dist.barrier()
    start = time.perf_counter()
    step()
    end = time.perf_counter()
    return Repeat(start, end, {number: stage.napping.took for number, stage in stages.items()})


def table(rows: list[Row], settings: Settings) -> str:
    """A line for each schedule and driver; what is gained is measured against ``1f1b`` under the same driver."""
    ofs = {(row.ranks, row.driver): row for row in rows if row.schedule == "1f1b"}
    lines = []
    for row in rows:
        median = statistics.median(row.makespans)
        line = f"{row.ranks:>5} {row.schedule:>8} {row.driver:>7} {row.nominal:8.3f} {median:9.3f}"
        line += "".join(f" {each / row.nominal:7.3f}" for each in (min(row.makespans), median, max(row.makespans)))
        line += f" {row.share:7.2f} %"
        if plain := ofs.get((row.ranks, row.driver)):
            line += f" {plain.nominal / row.nominal:9.3f} {statistics.median(plain.makespans) / median:7.3f}"
        lines.append(line)
    return "\n".join(
        [
            f"F, I and W of a rank {settings.seconds * 1e3:g} ms each, {settings.microbatches} microbatches",
            f"{'ranks':>5} {'schedule':>8} {'driver':>7} {'nominal':>8} {'measured':>9} {'least':>7} {'median':>7} "
            f"{'most':>7} {'engine':>9} {'promised':>9} {'gained':>7}",
            *lines,
            "least, median, most: measured over nominal; engine: over the bound of the times taken in the same step",
            "promised, gained: 1f1b's makespan over this one's, nominal and measured",
        ]
    )


if __name__ == "__main__":
    main()
