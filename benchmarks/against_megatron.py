"""A GPTModel under this engine and under Megatron-core's own schedules: ``python -m benchmarks.against_megatron``.

The same chunks, the same microbatches, the same schedule; drivers take turns.  Before anything is timed, the losses and
the gradient norm of every parameter are compared with those of one process.  Two loads: the model, on two ranks, and
chunks that sleep, on two and on four.

The page is against_megatron.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict, frozen
from torch import Tensor, nn

import pipeline_engine as pe
from art_adapter.base_model import named_globally
from art_adapter.progress import say, with_bar
from art_adapter.tiny_gpt import (
    Cut,
    Shape,
    build_runtime,
    initialise_parallel_state,
    transformer_config,
)
from benchmarks.against_torch import timed, zero_grad
from benchmarks.megatron_peer import Forward, Loss, configure, megatron_step
from benchmarks.record import Record
from benchmarks.sleeping import Sleeping
from benchmarks.steps import ROWS, graph_for
from benchmarks.tables import markdown, ratios
from pipeline_engine.launch import run_ranks

SCHEDULES = ("1f1b", "interleaved")
WARM_UPS = 2
SECONDS = 600.0

Step = Callable[[], Sequence[Tensor]]
Seconds = dict[str, dict[str, list[float]]]  # by schedule and driver, each repeat until the last rank was done


@frozen
class Model:
    """A GPTModel and its microbatches, ``[1, tokens]`` each."""

    tokens: int
    shape: Shape

    def __str__(self) -> str:
        of = self.shape
        return f"{of.layers} layers, hidden {of.hidden}, vocabulary {of.vocabulary:,}, rows of {self.tokens} tokens"


def gpt(hidden: int, tokens: int) -> Model:
    """Eight layers of that width."""
    return Model(
        tokens,
        Shape(layers=8, hidden=hidden, heads=8, query_groups=8, feed_forward=4 * hidden, vocabulary=1024, gated=False),
    )


SMALL, LARGE = gpt(hidden=128, tokens=64), gpt(hidden=512, tokens=256)


@frozen
class Nap:
    """Seconds that a rank sleeps for each microbatch, spread evenly over its chunks."""

    forward: float
    backward: float

    def __str__(self) -> str:
        return f"{self.forward * 1e3:g} ms forward, {self.backward * 1e3:g} ms backward"


@frozen
class Settings:
    """What is measured in one go; ``repeats`` are turns of all drivers."""

    schedules: tuple[str, ...]
    ranks: int
    microbatches: int
    repeats: int
    load: Model | Nap


@frozen(eq=False)
class Work:
    """One rank's chunks by stage, and what is done with them.

    Attributes:
        shape: rows and columns of what goes from chunk to chunk.
        named: a chunk's parameters with their names in the whole model.
    """

    chunks: Mapping[int, Any]
    microbatches: Sequence[Tensor]
    shape: tuple[int, int]
    forward: Forward
    loss: Loss
    named: Callable[[Any], Iterable[tuple[str, nn.Parameter]]]

    def stage(self, number: int) -> Callable[..., Tensor]:
        """A chunk as this engine calls it."""
        chunk = self.chunks[number]

        def run(*received: Tensor, microbatch: Tensor) -> Tensor:
            chunk.set_input_tensor(list(received) or [None])
            return self.forward(chunk, microbatch)

        return run


@frozen
class Truth:
    """What one process finds: the losses, and the gradient norm of each parameter by its name in the whole model."""

    losses: list[float]
    norms: dict[str, float]


class SleepingChunk(nn.Module):
    """A sleeping stage with what Megatron asks of a chunk."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from megatron.core.enums import ModelType

        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.stage = Sleeping(config.hidden_size)
        self.received: Tensor | None = None

    def set_input_tensor(self, received: list[Tensor | None]) -> None:
        self.received = received[0]

    def forward(self, hidden: Tensor) -> Tensor:
        napped: Tensor = self.stage(hidden if self.received is None else self.received)
        return napped


def main() -> None:
    options = parser().parse_args()
    record, found = Record(), []
    for settings in with_bar(plans(options), "loads"):
        seconds = measure(settings)
        found.append({**asdict(settings, recurse=False), "load": str(settings.load), "seconds": seconds})
        say(f"{table(seconds, settings)}\n")
    record.end(options.json, measured=found)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.against_megatron", description=__doc__.splitlines()[0])
    made.add_argument("--quick", action="store_true", help="the small model, fewer repeats: within 90 seconds")
    made.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES, metavar="SCHEDULE")
    made.add_argument("--loads", nargs="+", choices=("small", "large", "sleeping"), metavar="LOAD")
    made.add_argument("--ranks", nargs="+", type=int, default=(2, 4), metavar="P", help="of sleeping chunks")
    made.add_argument("--microbatches", type=int, default=8, metavar="M")
    made.add_argument("--repeats", type=int, default=9, metavar="N", help="of the large model and of sleeping chunks")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every step time as data")
    return made


def plans(options: argparse.Namespace) -> list[Settings]:
    """What is measured, in order."""
    schedules, count = tuple(options.schedules), options.microbatches
    repeats = 3 if options.quick else options.repeats
    loads = options.loads or (("small", "sleeping") if options.quick else ("small", "large", "sleeping"))
    known = {
        "small": [Settings(schedules, 2, count, 5 * repeats, SMALL)],
        "large": [Settings(schedules, 2, count, repeats, LARGE)],
        "sleeping": [Settings(schedules, ranks, count, repeats, Nap(0.02, 0.04)) for ranks in options.ranks],
    }
    return [settings for load in loads for settings in known[load]]


def measure(settings: Settings) -> Seconds:
    truth = run_ranks(truth_of_one_process, 1, settings, timeout=SECONDS)[0]
    seconds: Seconds = run_ranks(seconds_on_rank, settings.ranks, settings, truth, timeout=SECONDS)[0]
    return seconds


def truth_of_one_process(rank: int, settings: Settings) -> Truth:
    """One backward for each microbatch, through the whole model in one process."""
    work = work_of(settings, Cut())
    run, losses = work.stage(0), []
    for microbatch in work.microbatches:
        loss = work.loss(run(microbatch=microbatch))
        (loss / len(work.microbatches)).backward()
        losses.append(loss.item())
    return Truth(losses, norms_of(work))


def seconds_on_rank(rank: int, settings: Settings, truth: Truth) -> Seconds:
    """For each schedule and driver the seconds of every repeat, until the slowest rank was done."""
    found: Seconds = {}
    for schedule in settings.schedules:
        work, graph = work_of(settings, cut_for(schedule, settings.ranks)), graph_for(schedule, settings.ranks)
        stages = {number: work.stage(number) for number in graph.stages_of(rank)}
        transport = pe.TorchTransport()
        with pe.Pipeline(stages, graph=graph, schedule=schedule, transport=transport, deadline=120.0) as pipeline:
            drivers = drivers_of(pipeline, work)
            for driver, step in drivers.items():
                check(step, work, truth, f"{schedule} {driver}")
            if isinstance(settings.load, Nap):
                fall_asleep(work.chunks.values(), settings.load)
            for _ in range(settings.repeats):
                for driver, step in drivers.items():
                    seconds = timed(step, work.chunks)
                    found.setdefault(schedule, {}).setdefault(driver, []).append(seconds)
    return found


def cut_for(schedule: str, ranks: int) -> Cut:
    return Cut(pipeline=ranks, virtual=chunks_per_rank(schedule, ranks))


def chunks_per_rank(schedule: str, ranks: int) -> int:
    return graph_for(schedule, ranks).num_stages // ranks


def work_of(settings: Settings, cut: Cut) -> Work:
    """This rank's part of the load."""
    match settings.load:
        case Model() as model:
            return gpt_work(model, cut, settings.microbatches)
        case Nap():
            return sleeping_work(cut, settings.microbatches)


def gpt_work(model: Model, cut: Cut, microbatches: int) -> Work:
    """Next-token losses; the last chunk computes one for each token, as in Megatron's own training script."""
    chunks = build_runtime(model.shape, cut, train_base=True).model
    configure(chunks[0].config)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, model.shape.vocabulary, (microbatches, 1, model.tokens), generator=generator)
    positions = torch.arange(model.tokens)[None]
    hidden_from = torch.ones(1, 1, model.tokens, model.tokens, dtype=torch.bool).triu(1)

    def forward(chunk: Any, row: Tensor) -> Tensor:
        labels = row.roll(-1, dims=1) if chunk.post_process else None
        output: Tensor = chunk(row, positions, hidden_from, labels=labels)
        return output

    return Work(by_stage(chunks, cut), list(rows), (model.tokens, 1), forward, torch.mean, named_globally)


def sleeping_work(cut: Cut, microbatches: int) -> Work:
    initialise_parallel_state(cut)
    config = transformer_config(Shape(layers=cut.stages), cut)
    configure(config)
    chunks = [SleepingChunk(config) for _ in range(cut.virtual)]
    hidden = torch.zeros(microbatches, ROWS, 1, config.hidden_size)
    names = SleepingChunk.named_parameters
    return Work(by_stage(chunks, cut), list(hidden), (ROWS, 1), lambda chunk, rows: chunk(rows), torch.sum, names)


def by_stage(chunks: Sequence[Any], cut: Cut) -> dict[int, Any]:
    rank = dist.get_rank()
    return {place * cut.pipeline + rank: chunk for place, chunk in enumerate(chunks)}


def fall_asleep(chunks: Collection[SleepingChunk], load: Nap) -> None:
    for chunk in chunks:
        naps = chunk.stage.naps
        naps.forward = load.forward / len(chunks)
        naps.backward_input = naps.backward_weight = load.backward / 2 / len(chunks)


def drivers_of(pipeline: pe.Pipeline, work: Work) -> dict[str, Step]:
    """By name, functions that run one step; all give the gradients of the mean of the losses."""
    data = [pe.Microbatch(shared={"microbatch": microbatch}) for microbatch in work.microbatches]

    def stream() -> list[Tensor]:
        losses = []
        for item in pipeline.stream(data):
            loss = work.loss(item.outputs)
            (loss / len(data)).backward()
            losses.append(loss.detach())
        pipeline.flush()
        return losses

    def step() -> list[Tensor]:
        losses = pipeline.step(data, lambda outputs, _: work.loss(outputs) / len(data))
        return [loss * len(data) for loss in losses]

    peer = megatron_step(
        list(work.chunks.values()),
        microbatches=work.microbatches,
        shape=work.shape,
        forward=work.forward,
        loss=work.loss,
    )
    return {"stream": stream, "step": step, "megatron": peer}


def check(step: Step, work: Work, truth: Truth, what: str) -> None:
    """Steps that warm up, untimed; losses and gradients of the last must be those of one process."""
    losses: Sequence[Tensor] = ()
    for _ in range(WARM_UPS):
        zero_grad(work.chunks)
        losses = step()
    if losses:  # Megatron has them on the last rank only
        torch.testing.assert_close([float(loss) for loss in losses], truth.losses, rtol=1e-4, atol=1e-5, msg=what)
    for name, norm in norms_of(work).items():
        torch.testing.assert_close(norm, truth.norms[name], rtol=1e-4, atol=1e-6, msg=f"{what}: gradient of {name}")


def norms_of(work: Work) -> dict[str, float]:
    """By the parameter's name in the whole model, the norm of its gradient."""
    every = (pair for chunk in work.chunks.values() for pair in work.named(chunk))
    return {name: float(parameter.grad.double().norm()) for name, parameter in every}


def table(seconds: Seconds, settings: Settings) -> str:
    """A line for each schedule: seconds of a step, and ratios of steps in the same turn."""
    heads = ["ranks", "schedule", "Megatron", "`stream` / Megatron", "`step` / Megatron", "`stream` / `step`"]
    lines = []
    for schedule, by_driver in seconds.items():
        stream, step, peer = (by_driver[driver] for driver in ("stream", "step", "megatron"))
        line = [str(settings.ranks), schedule, f"{statistics.median(peer):.3f} s"]
        lines.append([*line, ratios(stream, peer), ratios(step, peer), ratios(stream, step)])
        if isinstance(settings.load, Nap):
            ideal = simulated(schedule, settings.ranks, settings.microbatches, settings.load)
            lines[-1] += [f"{ideal:.3f} s", *(f"{statistics.median(own) / ideal:.3f}" for own in (peer, stream, step))]
    if isinstance(settings.load, Nap):
        heads += ["simulated", "Megatron / simulated", "`stream` / simulated", "`step` / simulated"]
    title = f"{settings.load}; {settings.microbatches} microbatches, {settings.repeats} alternating repeats"
    return f"{title}\n\n{markdown(heads, lines)}"


def simulated(schedule: str, ranks: int, microbatches: int, load: Nap) -> float:
    """Makespan of a step if nothing but the sleeping took time, in seconds."""
    share = chunks_per_rank(schedule, ranks)
    half = load.backward / 2 / share
    costs = pe.Costs(forward=load.forward / share, backward_input=half, backward_weight=half)
    return pe.simulate(pe.build(schedule, graph_for(schedule, ranks), num_microbatches=microbatches), costs).makespan


if __name__ == "__main__":
    main()
