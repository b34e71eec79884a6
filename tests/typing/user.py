"""A user's file: ``mypy --strict`` and ``pyright`` accept it as it stands."""

from __future__ import annotations

import torch
from torch import nn

import art_adapter
import pipeline_engine as pe
from pipeline_engine.testing import run_ranks_in_threads


def train(process_group: torch.distributed.ProcessGroup, layers: list[nn.Module]) -> list[float]:
    """Every name of the README's loops, with the types that a user gives them."""
    graph: pe.StageGraph = pe.StageGraph.chain(stages=2, ranks=2, placement="straight")
    schedule: pe.Schedule = pe.build("1f1b", graph, num_microbatches=4)
    pe.check(schedule)
    transport, tracer = pe.TorchTransport(process_group, timeout=30.0), pe.Tracer()
    stage = nn.Sequential(*pe.split(layers, stages=2, costs=lambda layer: 1.0)[transport.rank])
    microbatches = [pe.Microbatch((torch.ones(n, 8),), {"scale": 2.0}, weight=float(n)) for n in (3, 1)]
    losses: list[float] = []
    with pe.Pipeline(
        {transport.rank: stage},
        graph=graph,
        schedule=schedule,
        transport=transport,
        deadline=60.0,
        order="planned",
        max_in_flight=None,
        tracer=tracer,
        ties=[pe.tie("shared", {transport.rank: nn.Parameter(torch.ones(2))})],
        rng="per-microbatch",
        verify=True,
    ) as pipeline:
        for item in pipeline.stream(iter(microbatches), num_microbatches=2):
            loss: torch.Tensor = item.outputs.square().mean() + float(item.index)
            torch.autograd.backward(loss)
            losses.append(loss.item())
            pipeline.invalidate()
        outputs = pipeline.forward(microbatches)
        pipeline.flush()
        steps: list[torch.Tensor] = pipeline.step(microbatches, lambda outputs, index: outputs.sum() * index)
        sent: dict[str, int] = pipeline.bytes_per_channel
        trace: pe.Trace = tracer.gather(transport)
    print(pe.report(trace), len(outputs), steps, sent)
    return losses


def plan(weights: list[float]) -> tuple[float, str]:
    """The half without torch."""
    costs = pe.Costs(forward=[1.0, 2.0], backward_input=1, latency={"x0:0>1": 0.1}, weights=weights)
    choice: pe.Choice = pe.best_schedule(pe.StageGraph.chain(2, 2), costs, memory_budget=8.0, schedules=["1f1b"])
    timeline: pe.Timeline = pe.simulate(choice.schedule, costs)
    return timeline.makespan, choice.reason


def in_threads() -> list[int]:
    """Ranks as threads."""
    return run_ranks_in_threads(lambda transport: transport.rank, 2)


def catch(error: pe.PipelineError) -> str:
    """What an error tells."""
    return error.doing if isinstance(error, pe.PeerFailedError) else str(error)


def train_with_art(runtime: art_adapter.Runtime, inputs: list[art_adapter.ForwardInput]) -> None:
    """TrainerRank is whichever class fits the topology."""
    trainer = art_adapter.TrainerRank(runtime, schedule="1f1b", deadline=60.0)
    for window in trainer.forward_micro_batches(inputs):
        window.outputs[0].target_logprobs.sum().backward()
    trainer.optim_step(params=art_adapter.AdamParams(learning_rate=1e-5))
    print(art_adapter.SUPPORT["pp"].supported)
