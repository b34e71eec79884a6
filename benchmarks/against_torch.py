"""A real transformer under this engine and under torch.distributed.pipelining: ``python -m benchmarks.against_torch``.

Two ranks on two cores, one thread each, the same weights, the same microbatches, the same schedule.  Drivers take
turns.  Before anything is timed, the gradients of every driver are compared with those of one process.  Beside them
each rank runs its stages alone, without any pipeline: what no engine can win back.

The page is against_torch.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from attrs import asdict, frozen
from torch import Tensor, nn

import pipeline_engine as pe
from art_adapter.progress import progress
from benchmarks.record import Record
from benchmarks.steps import graph_for
from benchmarks.tables import markdown, ratios
from benchmarks.torch_peer import torch_text_step
from benchmarks.transformer import Shape, cut, next_token_loss, text
from pipeline_engine.launch import run_ranks, tell

PEERS = {  # torch's schedules beside each of ours
    "gpipe": ("gpipe",),
    "1f1b": ("1f1b",),
    "interleaved": ("interleaved", "interleaved zero-bubble"),
    "zb-v": ("zb-v",),
}
OWN = ("stream", "step", "alone")
RANKS = 2
SECONDS_TO_START = 60.0

Step = Callable[[], None]
Seconds = dict[str, list[float]]  # of every repeat, by driver: one of ``OWN``, or a schedule of torch
Key = tuple[int, str]  # microbatches, schedule


@frozen
class Settings:
    """What is measured."""

    schedules: tuple[str, ...]
    microbatches: tuple[int, ...]
    repeats: int
    shape: Shape


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against_torch", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer repeats: within 90 seconds")
    parser.add_argument("--schedules", nargs="+", choices=PEERS, default=tuple(PEERS), metavar="SCHEDULE")
    parser.add_argument("--microbatches", nargs="+", type=int, default=(8, 16), metavar="M")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="of a microbatch")
    parser.add_argument("--repeats", type=int, default=7, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every step time as data")
    options = parser.parse_args()
    shape = Shape(hidden=256, tokens=64) if options.quick else Shape(tokens=options.tokens)
    repeats = 3 if options.quick else options.repeats
    settings = Settings(tuple(options.schedules), tuple(options.microbatches), repeats, shape)
    record = Record()
    limit = SECONDS_TO_START + 2.0 * len(PEERS) * (len(OWN) + 2) * (repeats + 2) * sum(settings.microbatches)
    with progress("cases", len(settings.microbatches) * len(settings.schedules)) as case_done:
        found = run_ranks(seconds_on_rank, RANKS, settings, timeout=limit, on_news=lambda rank, case: case_done())
    seconds: dict[Key, Seconds] = found[0]
    print(f"{shape}, {RANKS} ranks\n\n" + "\n".join(table(seconds, count) for count in settings.microbatches))
    data = [{"microbatches": key[0], "schedule": key[1], "seconds": each} for key, each in seconds.items()]
    record.end(options.json, settings=asdict(settings), found=data)


def seconds_on_rank(rank: int, settings: Settings) -> dict[Key, Seconds]:
    """For each case the seconds of every repeat, until the slower rank was done; drivers take turns."""
    found: dict[Key, Seconds] = {}
    for count in settings.microbatches:
        rows = text(settings.shape, count)
        truth = gradients_of_one_process(settings, rows)
        for schedule in settings.schedules:
            graph = graph_for(schedule, RANKS)
            parts = cut(settings.shape, graph.num_stages)
            stages = {stage: parts[stage] for stage in graph.stages_of(rank)}
            transport = pe.TorchTransport()
            with pe.Pipeline(stages, graph=graph, schedule=schedule, transport=transport, deadline=120.0) as pipeline:
                drivers = drivers_of(pipeline, stages, graph, schedule, rows, settings.shape.hidden)
                for driver, step in drivers.items():
                    warm_up(step, stages, graph, truth if driver != "alone" else {})
                found[count, schedule] = {driver: [] for driver in drivers}
                for _ in range(settings.repeats):
                    for driver, step in drivers.items():
                        found[count, schedule][driver].append(timed(step, stages))
            if rank == 0:
                tell((count, schedule))
    return found


def drivers_of(
    pipeline: pe.Pipeline,
    stages: dict[int, nn.Sequential],
    graph: pe.StageGraph,
    schedule: str,
    rows: list[Tensor],
    hidden: int,
) -> dict[str, Step]:
    data = [pe.Microbatch(inputs=(row,)) for row in rows]

    def stream() -> None:
        for item in pipeline.stream(data):
            next_token_loss(item.outputs, rows[item.index]).backward()
        pipeline.flush()

    def step() -> None:
        pipeline.step(data, lambda logits, index: next_token_loss(logits, rows[index]))

    peers = {peer: torch_text_step(stages, graph, peer, rows) for peer in PEERS[schedule]}
    return {"stream": stream, "step": step, **peers, "alone": lambda: run_alone(stages, graph, rows, hidden)}


def run_alone(stages: dict[int, nn.Sequential], graph: pe.StageGraph, rows: list[Tensor], hidden: int) -> None:
    """This rank's forwards, losses and backwards in a plain loop, nothing sent."""
    for row in rows:
        for number, stage in stages.items():
            outputs = stage(row if number == 0 else torch.zeros(*row.shape, hidden, requires_grad=True))
            (next_token_loss(outputs, row) if number == graph.last_stage else outputs.sum()).backward()


def gradients_of_one_process(settings: Settings, rows: list[Tensor]) -> dict[str, Tensor]:
    """By the place of a layer in the whole model and its parameter's name."""
    model = cut(settings.shape, 1)[0]
    for row in rows:
        next_token_loss(model(row), row).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def warm_up(step: Step, stages: dict[int, nn.Sequential], graph: pe.StageGraph, truth: dict[str, Tensor]) -> None:
    """Two steps, untimed; their gradients must be those of one process, if there are any to compare with."""
    for _ in range(2):
        zero_grad(stages)
        step()
    if not truth:
        return
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


def table(seconds: dict[Key, Seconds], count: int) -> str:
    """Step times of torch, and ratios to torch in the same turn."""
    lines = []
    for (microbatches, schedule), by_driver in seconds.items():
        for peer in PEERS[schedule] if microbatches == count else ():
            over = (ratios(by_driver[driver], by_driver[peer]) for driver in OWN)
            lines.append((schedule, peer, f"{statistics.median(by_driver[peer]):.3f} s", *over))
    heads = ["schedule", "torch's", "torch", "`Pipeline.stream`", "`Pipeline.step`", "alone"]
    return f"{count} microbatches:\n\n{markdown(heads, lines)}\n"


if __name__ == "__main__":
    main()
