"""Graphs that are no chains: skip edges carry values and gradients, joins add up from the highest consumer down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pipeline_engine as pe
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.testing import run_ranks_in_threads
from tests.oracles.plain import Gradients, gradients_of, run_plain
from tests.run.mixtures import edges, placements
from tests.run.playing import DEADLINE, WIDTH, batch, loss_of
from tests.run.processes import Crash, run_in_processes
from tests.strategies import chain_for, schedule_names

ROWS = [3, 1, 4, 2]


class Joining(nn.Module):
    """A stage of any number of inputs, each with a weight of its own; every output is one tensor."""

    def __init__(self, number: int, num_inputs: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_inputs))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.3, generator=generator)

    def forward(self, *inputs: torch.Tensor, number: int) -> torch.Tensor:
        terms = [linear(x) for linear, x in zip(self.linears, inputs, strict=True)]
        return torch.tanh(torch.stack(terms).sum(0))


def stage_of(number: int, graph: pe.StageGraph) -> Joining:
    return Joining(number, max(len(graph.before(number)), 1))


def train(transport: Transport, graph: pe.StageGraph, schedule: str, rows: list[int]) -> dict[int, Gradients]:
    stages = {number: stage_of(number, graph) for number in graph.stages_of(transport.rank)}
    with pe.Pipeline(stages, graph=graph, schedule=schedule, transport=transport, deadline=DEADLINE) as pipeline:
        for item in pipeline.stream(batch(rows)):
            loss_of(item.outputs, item.index).backward()
    return {number: gradients_of(stage) for number, stage in stages.items()}


def check(graph: pe.StageGraph, rows: list[int], ranks: list[Any]) -> None:
    """Every gradient is that of one process, to 1e-6 of its norm."""
    microbatches = batch(rows)
    stages = [stage_of(number, graph) for number in range(graph.num_stages)]
    inputs, shared = [each.inputs for each in microbatches], [each.shared for each in microbatches]
    truth = run_plain(stages, inputs, shared, loss_of, graph.before)
    for number, gradients in (pair for rank in ranks for pair in rank.items()):
        expected = truth.summed(number, range(len(rows)))
        assert gradients.keys() == expected.keys()
        for name, grad in expected.items():
            error = float((gradients[name] - grad).norm() / grad.norm().clamp_min(1e-3))
            assert error <= 1e-6, f"{name}.grad of stage {number} is off by {error}"


@st.composite
def graphs(draw: st.DrawFn) -> tuple[str, pe.StageGraph]:
    """A schedule, and any graph whose stages lie where it wants them."""
    name, ranks = draw(schedule_names), draw(st.integers(1, 4))
    rank_of = draw(placements(ranks)) if name == "gpipe" else chain_for(name, ranks).rank_of
    return name, pe.StageGraph(draw(edges(len(rank_of))), rank_of)


@settings(max_examples=50)
@given(graphs(), st.lists(st.integers(1, 3), min_size=1, max_size=5))
def test_every_schedule_runs_every_graph_whose_stages_lie_right(
    case: tuple[str, pe.StageGraph], rows: list[int]
) -> None:
    name, graph = case
    check(graph, rows, run_ranks_in_threads(lambda transport: train(transport, graph, name, rows), graph.num_ranks))


SKIPPING = {
    "straight": [(0, 1), (1, 2), (0, 2)],
    "looped": [(0, 1), (1, 2), (2, 3), (0, 3), (1, 3), (0, 2)],
    "vee": [(0, 1), (1, 2), (2, 3), (0, 3), (1, 3)],
}


def graph_with_skips(schedule: str) -> pe.StageGraph:
    placement = pe.SCHEDULES[schedule].placement
    return pe.StageGraph(SKIPPING[placement], chain_for(schedule, 3 if placement == "straight" else 2).rank_of)


def train_in_process(rank: int, cases: list[tuple[str, pe.StageGraph]]) -> list[dict[int, Gradients]]:
    return [train(pe.TorchTransport(), graph, schedule, ROWS) for schedule, graph in cases]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_skip_edges_carry_values_and_gradients_between_processes(num_ranks: int) -> None:
    every = [(schedule, graph_with_skips(schedule)) for schedule in pe.SCHEDULES]
    cases = [(schedule, graph) for schedule, graph in every if graph.num_ranks == num_ranks]
    ranks = run_in_processes(train_in_process, num_ranks, cases)
    for rank in ranks:
        assert not isinstance(rank, Crash), rank
    for index, (_, graph) in enumerate(cases):
        check(graph, ROWS, [rank[index] for rank in ranks])


@pytest.mark.parametrize("rank_of", [[0, 1, 2, 3], [0, 0, 0, 0], [0, 1, 0, 1], [0, 1, 1, 2]])
def test_gradients_meet_from_the_highest_consumer_down(rank_of: list[int]) -> None:
    """As autograd adds them: three numbers of which the order of addition can be read off the sum."""
    tiny, large = 2.0**-24, 1.0
    scales = [1.0, tiny, tiny, large]  # (large + tiny) + tiny is large, (tiny + tiny) + large is more
    graph = pe.StageGraph([(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)], rank_of)

    def on_rank(transport: Transport) -> list[float]:
        own = torch.ones(1, requires_grad=True)
        stages: dict[int, Any] = {
            0: lambda x: x * own,
            1: lambda x: x * scales[1],
            2: lambda x: x * scales[2],
            3: lambda x, y, z: x * scales[3] + y + z,
        }
        mine = {stage: stages[stage] for stage in graph.stages_of(transport.rank)}
        with pe.Pipeline(mine, graph=graph, schedule="gpipe", transport=transport, deadline=DEADLINE) as pipeline:
            for item in pipeline.stream([pe.Microbatch((torch.ones(1),))]):
                item.outputs.sum().backward()
        return [] if own.grad is None else own.grad.tolist()

    x = torch.ones(1, requires_grad=True)
    h = x * 1
    y, z = h * scales[1], h * scales[2]
    (h * scales[3] + y + z).sum().backward()
    assert x.grad is not None and run_ranks_in_threads(on_rank, graph.num_ranks)[0] == x.grad.tolist() == [large]


def test_a_consumer_that_uses_nothing_adds_nothing() -> None:
    graph = pe.StageGraph([(0, 1), (1, 2), (0, 2)], [0, 1, 2])
    grads: list[torch.Tensor | None] = []

    def on_rank(transport: Transport) -> None:
        own = torch.ones(2, requires_grad=True)
        stage = [lambda x: x * own, lambda x: x.detach() * 2, lambda x, y: x * 3 + y][transport.rank]
        with pe.Pipeline({transport.rank: stage}, graph=graph, schedule="1f1b", transport=transport) as pipeline:
            for item in pipeline.stream([pe.Microbatch((torch.ones(2),))] * 2):
                item.outputs.sum().backward()
        if transport.rank == 0:
            grads.append(own.grad)

    run_ranks_in_threads(on_rank, 3)
    assert grads[0] is not None and grads[0].tolist() == [6, 6]


def test_the_first_stage_takes_several_inputs_of_the_caller_and_gives_each_its_gradient() -> None:
    graph = pe.StageGraph([(0, 1), (1, 2), (0, 2)], [0, 1, 0])
    left, right = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)

    def on_rank(transport: Transport) -> None:
        stages: dict[int, Any] = {
            0: lambda x, pair: {"sum": x + pair["right"], "mask": pair["mask"]},
            1: lambda t: t["sum"] * t["mask"],
            2: lambda t, y: t["sum"] + y,
        }
        mine = {stage: stages[stage] for stage in graph.stages_of(transport.rank)}
        data = [pe.Microbatch((left, {"right": 2 * right, "mask": torch.tensor([True, False])}))]
        with pe.Pipeline(mine, graph=graph, schedule="gpipe", transport=transport, deadline=DEADLINE) as pipeline:
            for item in pipeline.stream(data):
                item.outputs.sum().backward()

    run_ranks_in_threads(on_rank, 2)
    assert left.grad is not None and right.grad is not None
    assert left.grad.tolist() == [2, 1] and right.grad.tolist() == [4, 2]


def test_a_schedule_refuses_a_graph_whose_stages_lie_wrong() -> None:
    graph = pe.StageGraph([(0, 1), (1, 2), (0, 2)], [0, 1, 0])
    with pytest.raises(pe.ScheduleError, match="schedule '1f1b' wants one stage on each rank"):
        pe.build("1f1b", graph, 2)
