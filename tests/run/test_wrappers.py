"""Torch's own wrappers around stages, on 2 x 2 ranks: what comes out is what one process would have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import pipeline_engine as pe
from tests.run.playing import DEADLINE, WIDTH, batch, loss_of, total
from tests.run.processes import Crash, run_in_processes

REPLICAS = [[3, 1, 2], [2, 4, 1]]
"""Rows of the microbatches of each replica."""


def layers(number: int) -> nn.Sequential:
    """What a stage computes; the same for a number on every rank."""
    made = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return made


def data(rows: list[int]) -> list[pe.Microbatch]:
    return [pe.Microbatch(each.inputs) for each in batch(rows)]


def mean_gradients(num_stages: int, replicas: list[list[int]]) -> list[list[torch.Tensor]]:
    """By stage, in one process."""
    model = [layers(stage) for stage in range(num_stages)]
    for rows in replicas:
        for number, each in enumerate(data(rows)):
            (loss_of(nn.Sequential(*model)(*each.inputs), number) / len(replicas)).backward()
    return [[parameter.grad for parameter in stage.parameters() if parameter.grad is not None] for stage in model]


def call(pipeline: pe.Pipeline, entry: str, rows: list[int]) -> None:
    if entry == "stream":
        for item in pipeline.stream(data(rows)):
            loss_of(item.outputs, item.index).backward()
    elif entry == "forward":
        total(loss_of(outputs, number) for number, outputs in enumerate(pipeline.forward(data(rows)))).backward()
    else:
        pipeline.step(data(rows), loss_of)
    pipeline.flush()


def compare(found: dict[int, nn.Module], replicas: list[list[int]], num_stages: int) -> None:
    expected = mean_gradients(num_stages, replicas)
    for number, stage in found.items():
        for parameter, grad in zip(stage.parameters(), expected[number], strict=True):
            whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            torch.testing.assert_close(whole, grad, rtol=1e-5, atol=1e-5)


def graph_for(schedule: str) -> pe.StageGraph:
    return pe.StageGraph.chain(4, 2, placement="looped") if schedule == "interleaved" else pe.StageGraph.chain(2, 2)


def one_stage_a_rank(mesh: DeviceMesh, stage: Callable[..., Any], **options: Any) -> pe.Pipeline:
    """Two stages under 1F1B over the mesh's second dimension."""
    return pe.Pipeline(
        {mesh.get_local_rank("pp"): stage},
        graph=pe.StageGraph.chain(2, 2),
        schedule="1f1b",
        transport=pe.TorchTransport(mesh.get_group("pp")),
        deadline=DEADLINE,
        **options,
    )


def under_ddp(mesh: DeviceMesh, schedule: str, entry: str) -> dict[int, int]:
    """Two steps; how often each stage's gradients were reduced."""
    graph, stages, reductions = graph_for(schedule), dict[int, DistributedDataParallel](), dict[int, int]()

    def reduce(stage, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and these would be strings
        reductions[stage] = reductions.get(stage, 0) + 1
        work = dist.all_reduce(bucket.buffer().div_(2), group=mesh.get_group("dp"), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]

    def reduce_now(stage: int) -> None:
        stages[stage].reducer.prepare_for_backward([])

    for number in graph.stages_of(mesh.get_local_rank("pp")):
        stages[number] = DistributedDataParallel(layers(number), process_group=mesh.get_group("dp"))
        stages[number].register_comm_hook(number, reduce)
    with (
        ExitStack() as stack,
        pe.Pipeline(
            stages,
            graph=graph,
            schedule=schedule,
            transport=pe.TorchTransport(mesh.get_group("pp")),
            deadline=DEADLINE,
            on_last_backward=reduce_now,
        ) as pipeline,
    ):
        for stage in stages.values():
            stack.enter_context(stage.no_sync())
        for _ in range(2):
            for stage in stages.values():
                stage.zero_grad()
            call(pipeline, entry, REPLICAS[mesh.get_local_rank("dp")])
    compare(dict(stages), REPLICAS, graph.num_stages)
    return reductions


def under_fsdp(mesh: DeviceMesh, entry: str) -> None:
    number = mesh.get_local_rank("pp")
    stage: Any = fully_shard(layers(number), mesh=mesh["dp"])

    def reduce_in_last(is_last: bool) -> None:
        stage.set_is_last_backward(is_last)
        stage.set_requires_gradient_sync(is_last)

    with one_stage_a_rank(mesh, stage, on_last_backward=lambda _: reduce_in_last(True)) as pipeline:
        for _ in range(2):
            stage.zero_grad()
            reduce_in_last(False)
            call(pipeline, entry, REPLICAS[mesh.get_local_rank("dp")])
    compare({number: stage}, REPLICAS, 2)


def under_tensor_parallelism(mesh: DeviceMesh, entry: str) -> None:
    """DTensors within the stages, plain tensors between them."""
    number = mesh.get_local_rank("pp")
    stage = parallelize_module(layers(number), mesh["dp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with one_stage_a_rank(mesh, stage) as pipeline:
        call(pipeline, entry, REPLICAS[0])
    compare({number: stage}, REPLICAS[:1], 2)


def returning_a_dtensor(mesh: DeviceMesh) -> str:
    with (
        pytest.raises((pe.UsageError, pe.PeerFailedError)) as raised,
        one_stage_a_rank(mesh, lambda x: distribute_tensor(x.detach(), mesh["dp"], [Replicate()])) as pipeline,
    ):
        pipeline.forward(data([1]))
    return str(raised.value)


def scaled(mesh: DeviceMesh) -> None:
    """Three optimizer steps, in the second of which one rank alone finds an infinite gradient."""
    number, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    stage, scales = layers(number), []
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device="cpu", init_scale=1024.0, process_group=group)
    with one_stage_a_rank(mesh, stage) as pipeline:
        for turn in range(3):
            for item in pipeline.stream(data(REPLICAS[0])):
                scaler.scale(loss_of(item.outputs, item.index)).backward()
            pipeline.flush()
            if (turn, number) == (1, 1):
                stage[0].weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            optimizer.zero_grad()
    assert scales == [1024.0, 512.0, 512.0]
    model = nn.Sequential(layers(0), layers(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for index, each in enumerate(data(REPLICAS[0])):
            loss_of(model(*each.inputs), index).backward()
        optimizer.step()
        optimizer.zero_grad()
    for mine, expected in zip(stage.parameters(), model[number].parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


ENTRIES = ("stream", "forward", "step")


def all_wrappers(rank: int) -> dict[str, object]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    found: dict[str, object] = {
        f"{schedule} {entry}": under_ddp(mesh, schedule, entry)
        for schedule in ("1f1b", "interleaved")
        for entry in ENTRIES
    }
    for wrapper in (under_fsdp, under_tensor_parallelism):
        for entry in ENTRIES:
            wrapper(mesh, entry)
    scaled(mesh)
    return found | {"a DTensor": returning_a_dtensor(mesh)}


def test_wrapped_stages_have_the_gradients_of_one_process_reduced_once_a_step() -> None:
    for rank, found in enumerate(run_in_processes(all_wrappers, 4)):
        assert not isinstance(found, Crash), found
        said = found.pop("a DTensor")
        assert "a stage returned a DTensor; only plain dense tensors travel" in said and "to_local()" in said, said
        for how, reductions in found.items():
            stages = (0, 1, 2, 3)[rank % 2 :: 2] if how.startswith("interleaved") else (rank % 2,)
            assert reductions == dict.fromkeys(stages, 2), how
