"""Tied parameters: every copy gets the gradient that one process would give the one parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pipeline_engine as pe
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.testing import run_ranks_in_threads
from tests.run.playing import DEADLINE, WIDTH, batch, loss_of
from tests.run.processes import Crash, run_in_processes

ROWS = [3, 1, 4, 2]


class Layer(torch.nn.Module):
    """A linear layer; the first and the last one of a model share their weight."""

    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / 3)

    def forward(self, x: torch.Tensor, *, number: int = 0) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


def tied_layer(number: int, num_stages: int) -> Layer:
    return Layer(0 if number == num_stages - 1 else number)


def gradients_of_one_process(num_stages: int, passes: int) -> list[torch.Tensor | None]:
    layers = [Layer(stage) for stage in range(num_stages - 1)]
    layers.append(layers[0])
    for _ in range(passes):
        for number, microbatch in enumerate(batch(ROWS)):
            x = microbatch.inputs[0]
            for layer in layers:
                x = layer(x)
            loss_of(x, number).backward()
    return [layer.weight.grad for layer in layers]


@pytest.mark.parametrize("schedule, placement", [("1f1b", "straight"), ("zb-v", "vee"), ("interleaved", "looped")])
def test_every_copy_gets_the_sum_at_each_flush(schedule: str, placement: str) -> None:
    num_ranks = 3
    graph = pe.StageGraph.chain(num_ranks if placement == "straight" else 2 * num_ranks, num_ranks, placement)
    ends = (0, graph.last_stage)

    def on_rank(transport: Transport) -> dict[int, torch.Tensor]:
        stages = {stage: tied_layer(stage, graph.num_stages) for stage in graph.stages_of(transport.rank)}
        mine = {stage: layer.weight for stage, layer in stages.items() if stage in ends}
        ties = [pe.tie("ends", mine)] if mine else []
        with pe.Pipeline(
            stages, graph=graph, schedule=schedule, transport=transport, deadline=DEADLINE, ties=ties
        ) as pipeline:
            for _ in range(2):
                for item in pipeline.stream(batch(ROWS)):
                    loss_of(item.outputs, item.index).backward()
                pipeline.flush()
        return {stage: layer.weight.grad for stage, layer in stages.items()}

    found = {stage: grad for grads in run_ranks_in_threads(on_rank, num_ranks) for stage, grad in grads.items()}
    for stage, expected in enumerate(gradients_of_one_process(graph.num_stages, passes=2)):
        torch.testing.assert_close(found[stage], expected, rtol=1e-6, atol=1e-6, msg=f"stage {stage}")
    assert torch.equal(found[0], found[graph.last_stage])


def test_without_the_tie_the_copies_would_differ() -> None:
    expected = gradients_of_one_process(3, passes=1)[0]

    def on_rank(transport: Transport) -> torch.Tensor | None:
        layer = tied_layer(transport.rank, 3)
        graph = pe.StageGraph.chain(3, 3)
        with pe.Pipeline({transport.rank: layer}, graph=graph, schedule="1f1b", transport=transport) as pipeline:
            for item in pipeline.stream(batch(ROWS)):
                loss_of(item.outputs, item.index).backward()
        return layer.weight.grad

    first, _, last = run_ranks_in_threads(on_rank, 3)
    assert not torch.allclose(first, expected) and not torch.allclose(first, last)
    torch.testing.assert_close(first + last, expected, rtol=1e-6, atol=1e-6)


def test_copies_of_different_shapes_are_refused_on_every_rank() -> None:
    def on_rank(transport: Transport) -> str:
        parameter = torch.nn.Parameter(torch.zeros(2 + transport.rank))
        graph = pe.StageGraph.chain(2, 2)
        with pytest.raises(pe.UsageError, match="tie 'ends' has shapes") as raised:
            pe.Pipeline(
                {transport.rank: Layer(0)},
                graph=graph,
                schedule="1f1b",
                transport=transport,
                ties=[pe.tie("ends", {transport.rank: parameter})],
            )
        return str(raised.value)

    assert len(set(run_ranks_in_threads(on_rank, 2))) == 1


def test_a_tie_names_parameters_of_its_own_rank() -> None:
    def on_rank(transport: Transport) -> None:
        foreign = pe.tie("ends", {1 - transport.rank: torch.nn.Parameter(torch.zeros(2))})
        with pytest.raises(pe.UsageError, match=f"stage {1 - transport.rank}, which is not on rank {transport.rank}"):
            pe.Pipeline(
                {transport.rank: Layer(0)},
                graph=pe.StageGraph.chain(2, 2),
                schedule="1f1b",
                transport=transport,
                ties=[foreign],
            )

    run_ranks_in_threads(on_rank, 2)


def test_an_empty_tie_is_refused() -> None:
    with pytest.raises(pe.UsageError, match="names no parameter"):
        pe.tie("ends", {})


def layers_in_process(rank: int, schedule: str, placement: Any) -> dict[int, torch.Tensor | None]:
    graph = pe.StageGraph.chain(2 if placement == "straight" else 4, 2, placement)
    stages = {stage: tied_layer(stage, graph.num_stages) for stage in graph.stages_of(rank)}
    mine = {stage: layer.weight for stage, layer in stages.items() if stage in (0, graph.last_stage)}
    with pe.Pipeline(
        stages,
        graph=graph,
        schedule=schedule,
        transport=pe.TorchTransport(),
        deadline=DEADLINE,
        ties=[pe.tie("ends", mine)] if mine else [],
    ) as pipeline:
        for _ in range(2):
            pipeline.step(batch(ROWS), loss_of)
            pipeline.flush()
    return {stage: layer.weight.grad for stage, layer in stages.items()}


@pytest.mark.parametrize("schedule, placement", [("1f1b", "straight"), ("zb-v", "vee"), ("interleaved", "looped")])
def test_copies_in_different_processes_get_the_sum_too(schedule: str, placement: str) -> None:
    """In a vee both ends are on one rank, so that nothing need be sent."""
    ranks = run_in_processes(layers_in_process, 2, schedule, placement)
    for rank in ranks:
        assert not isinstance(rank, Crash), rank
    found = {stage: grad for rank in ranks for stage, grad in rank.items()}
    for stage, expected in enumerate(gradients_of_one_process(len(found), passes=2)):
        torch.testing.assert_close(found[stage], expected, rtol=1e-6, atol=1e-6, msg=f"stage {stage}")
    assert torch.equal(found[0], found[len(found) - 1])


def test_gradients_that_were_there_before_are_kept_and_not_sent() -> None:
    def on_rank(transport: Transport) -> torch.Tensor | None:
        layer = tied_layer(transport.rank, 2)
        layer.weight.grad = torch.full((WIDTH, WIDTH), 1.0 + transport.rank)
        graph = pe.StageGraph.chain(2, 2)
        ties = [pe.tie("ends", {transport.rank: layer.weight})]
        with pe.Pipeline({transport.rank: layer}, graph=graph, schedule="1f1b", transport=transport, ties=ties) as p:
            for item in p.stream(batch(ROWS)):
                loss_of(item.outputs, item.index).backward()
        return layer.weight.grad

    expected = gradients_of_one_process(2, passes=1)[0]
    assert expected is not None
    for rank, grad in enumerate(run_ranks_in_threads(on_rank, 2)):
        torch.testing.assert_close(grad, expected + 1.0 + rank, rtol=1e-6, atol=1e-5)


def test_what_zero_grad_has_dropped_before_the_flush_is_in_no_sum() -> None:
    def on_rank(transport: Transport) -> torch.Tensor | None:
        layer = tied_layer(transport.rank, 3)
        mine = {transport.rank: layer.weight} if transport.rank != 1 else {}
        ties = [pe.tie("ends", mine)] if mine else []
        graph = pe.StageGraph.chain(3, 3)
        with pe.Pipeline({transport.rank: layer}, graph=graph, schedule="1f1b", transport=transport, ties=ties) as p:
            for again in (True, False):
                for item in p.stream(batch(ROWS)):
                    loss_of(item.outputs, item.index).backward()
                if again:
                    layer.zero_grad()
        return layer.weight.grad

    first, _, last = run_ranks_in_threads(on_rank, 3)
    torch.testing.assert_close(first, gradients_of_one_process(3, passes=1)[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(first, last)


def test_gradients_that_were_all_dropped_stay_dropped() -> None:
    def on_rank(transport: Transport) -> torch.Tensor | None:
        layer = tied_layer(transport.rank, 2)
        ties = [pe.tie("ends", {transport.rank: layer.weight})]
        graph = pe.StageGraph.chain(2, 2)
        with pe.Pipeline({transport.rank: layer}, graph=graph, schedule="1f1b", transport=transport, ties=ties) as p:
            for item in p.stream(batch(ROWS)):
                loss_of(item.outputs, item.index).backward()
            layer.zero_grad()
        return layer.weight.grad

    assert run_ranks_in_threads(on_rank, 2) == [None, None]


def test_a_closed_pipeline_leaves_no_hook_on_the_copies() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    for _ in range(2):
        transport = pe.MemoryTransport.connect(1)[0]
        graph = pe.StageGraph.chain(1, 1)
        pipeline = pe.Pipeline(
            {0: Layer(0)}, graph=graph, schedule="1f1b", transport=transport, ties=[pe.tie("ends", {0: weight})]
        )
        assert len(weight._backward_hooks) == 1
        pipeline.close()
    assert not weight._backward_hooks


def test_a_name_is_given_to_one_tie_only() -> None:
    transport = pe.MemoryTransport.connect(1)[0]
    ties = [pe.tie("ends", {0: torch.nn.Parameter(torch.zeros(2))}) for _ in range(2)]
    with pytest.raises(pe.UsageError, match="tie 'ends' is given twice on rank 0"):
        pe.Pipeline({0: Layer(0)}, graph=pe.StageGraph.chain(1, 1), schedule="1f1b", transport=transport, ties=ties)
