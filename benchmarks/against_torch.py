"""A real transformer under this engine and under torch.distributed.pipelining: ``python -m benchmarks.against_torch``.

Two ranks on two cores, one thread each, the same weights, the same microbatches, the same schedule.  Drivers take
turns.  Before anything is timed, the gradients of every driver are compared with those of one process.

The page is against_torch.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from attrs import asdict, frozen
from torch import Tensor, nn

import pipeline_engine as pe
from benchmarks.record import environment
from benchmarks.torch_peer import torch_step
from benchmarks.transformer import Shape, cut, next_token_loss, text
from pipeline_engine.launch import run_ranks
from pipeline_engine.plan.graph import Placement

DRIVERS = ("stream", "step", "torch")
PLACEMENTS: dict[str, tuple[int, Placement]] = {
    "gpipe": (1, "straight"),
    "1f1b": (1, "straight"),
    "interleaved": (2, "looped"),
    "zb-v": (2, "vee"),
}
RANKS = 2

Step = Callable[[], None]


@frozen
class Settings:
    """What is measured."""

    schedules: tuple[str, ...]
    microbatches: int
    repeats: int
    shape: Shape


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against_torch", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer repeats: within 90 seconds")
    parser.add_argument("--schedules", nargs="+", choices=PLACEMENTS, default=tuple(PLACEMENTS), metavar="SCHEDULE")
    parser.add_argument("--microbatches", type=int, default=8, metavar="M")
    parser.add_argument("--repeats", type=int, default=9, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every step time as data")
    options = parser.parse_args()
    shape = Shape(hidden=256, tokens=128) if options.quick else Shape()
    repeats = 3 if options.quick else options.repeats
    settings = Settings(tuple(options.schedules), options.microbatches, repeats, shape)
    before = environment()
    seconds = run_ranks(seconds_on_rank, RANKS, settings, timeout=600.0)[0]
    print(table(seconds, settings))
    print(", ".join(f"{name} {value}" for name, value in before.items()))
    if options.json:
        data = {"environment": before, "settings": asdict(settings), "seconds": seconds}
        options.json.write_text(json.dumps(data, indent=2) + "\n")


def seconds_on_rank(rank: int, settings: Settings) -> dict[str, dict[str, list[float]]]:
    """For each schedule and driver the seconds of every repeat, until the slower rank was done."""
    rows = text(settings.shape, settings.microbatches)
    truth = gradients_of_one_process(rank, settings, rows)
    found: dict[str, dict[str, list[float]]] = {}
    for schedule in settings.schedules:
        share, placement = PLACEMENTS[schedule]
        graph = pe.StageGraph.chain(share * RANKS, RANKS, placement)
        parts = cut(settings.shape, graph.num_stages)
        stages = {stage: parts[stage] for stage in graph.stages_of(rank)}
        transport = pe.TorchTransport()
        with pe.Pipeline(stages, graph=graph, schedule=schedule, transport=transport, deadline=120.0) as pipeline:
            drivers = drivers_of(pipeline, stages, graph, schedule, rows)
            for step in drivers.values():
                check(step, stages, graph, truth)
            for _ in range(settings.repeats):
                for driver, step in drivers.items():
                    seconds = timed(step, stages)
                    found.setdefault(schedule, {}).setdefault(driver, []).append(seconds)
    return found


def drivers_of(
    pipeline: pe.Pipeline, stages: dict[int, nn.Sequential], graph: pe.StageGraph, schedule: str, rows: list[Tensor]
) -> dict[str, Step]:
    data = [pe.Microbatch(inputs=(row,)) for row in rows]

    def stream() -> None:
        for item in pipeline.stream(data):
            next_token_loss(item.outputs, rows[item.index]).backward()
        pipeline.flush()

    def step() -> None:
        pipeline.step(data, lambda logits, index: next_token_loss(logits, rows[index]))

    peer = torch_step(
        stages,
        num_stages=graph.num_stages,
        schedule=schedule,
        inputs=rows,
        targets=torch.cat(rows),
        loss=next_token_loss,
    )
    return {"stream": stream, "step": step, "torch": peer}


def gradients_of_one_process(rank: int, settings: Settings, rows: list[Tensor]) -> dict[str, Tensor]:
    """By the place of a layer in the whole model and its parameter's name."""
    model = cut(settings.shape, 1)[0]
    for row in rows:
        next_token_loss(model(row), row).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def check(step: Step, stages: dict[int, nn.Sequential], graph: pe.StageGraph, truth: dict[str, Tensor]) -> None:
    """One step, untimed: a warm-up whose gradients must be those of one process."""
    for _ in range(2):
        zero_grad(stages)
        step()
    blocks = (max(int(name.split(".")[0]) for name in truth) - 1) // graph.num_stages
    for number, stage in stages.items():
        first = number * blocks + (number > 0)
        for name, parameter in stage.named_parameters():
            place, rest = name.split(".", 1)
            expected = truth[f"{first + int(place)}.{rest}"]
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5, msg=f"stage {number} {name}")


def timed(step: Step, stages: dict[int, nn.Sequential]) -> float:
    zero_grad(stages)
    dist.barrier()
    start = time.perf_counter()
    step()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def zero_grad(stages: dict[int, nn.Sequential]) -> None:
    for stage in stages.values():
        stage.zero_grad(set_to_none=True)


def table(seconds: dict[str, dict[str, list[float]]], settings: Settings) -> str:
    """Step times, and the ratio to torch in the same turn."""
    lines = [
        f"{settings.shape}, {settings.microbatches} microbatches, {RANKS} ranks",
        f"{'schedule':>11} {'driver':>8} {'seconds':>9} {'over torch':>11} {'least':>8} {'most':>8}",
    ]
    for schedule, by_driver in seconds.items():
        for driver, own in by_driver.items():
            ratios = [a / b for a, b in zip(own, by_driver["torch"], strict=True)]
            figures = (statistics.median(ratios), min(ratios), max(ratios))
            lines.append(
                f"{schedule:>11} {driver:>8} {statistics.median(own):9.3f} {figures[0]:11.3f} "
                f"{figures[1]:8.3f} {figures[2]:8.3f}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
