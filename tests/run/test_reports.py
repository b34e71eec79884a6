"""What others reported of pipelines: each report is a test here."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import pipeline_engine as pe
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.testing import run_ranks_in_threads
from tests.oracles.plain import gradients_of, run_plain
from tests.run.counting import stage_of_kind
from tests.run.playing import DEADLINE, WIDTH, Rank, batch, loss_of, on_ranks
from tests.run.processes import Crash, run_in_processes

SPLITTING = ["zb-h1", "zb-v", "dualpipe-v"]
ROWS = [2, 2, 2]


def linear(number: int) -> nn.Linear:
    made = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(number))
    return made


class Stage(nn.Module):
    """A function of a linear layer of its own."""

    def __init__(self, number: int, function: Any = lambda layer, x: torch.tanh(layer(x))) -> None:
        super().__init__()
        self.layer, self.function = linear(number), function

    def forward(self, *inputs: Any, number: int = 0) -> Any:
        return self.function(self.layer, *inputs)


def check_against_one_process(schedule: str, *functions: Any) -> None:
    """Two ranks; the stages are these functions in turn."""

    def make(number: int) -> Stage:
        return Stage(number, functions[number % len(functions)])

    def on_rank(rank: Rank) -> Any:
        for item in rank.pipeline.stream(batch(ROWS)):
            loss_of(item.outputs, item.index).backward()
        rank.pipeline.flush()
        return {number: gradients_of(stage) for number, stage in rank.stages.items()}

    ranks = on_ranks(on_rank, 2, schedule, make)
    microbatches = batch(ROWS)
    stages = [make(number) for number in range(sum(map(len, ranks)))]
    truth = run_plain(stages, [m.inputs for m in microbatches], [m.shared for m in microbatches], loss_of)
    for number, found in (pair for rank in ranks for pair in rank.items()):
        expected = truth.summed(number, range(len(ROWS)))
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-6, atol=1e-5, msg=f"{name} of stage {number}")


@pytest.mark.parametrize("schedule", pe.SCHEDULES)
def test_hooks_on_what_was_received_do_not_pile_up(schedule: str) -> None:
    """See pytorch issue 185331: receive buffers are used again and keep the hooks of earlier microbatches and steps."""
    fired: Counter[int] = Counter()

    def hooked(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda _: fired.update([len(steps)]))
        return layer(x)  # type: ignore[no-any-return]

    steps: list[int] = []

    def on_rank(rank: Rank) -> int:
        for _ in range(3):
            for item in rank.pipeline.stream(batch(ROWS)):
                loss_of(item.outputs, item.index).backward()
            rank.pipeline.flush()
            if rank.number == 0:
                steps.append(0)
            rank.pipeline.flush()  # so that no rank begins the next step before it is counted
        return len(rank.stages)

    num_stages = sum(on_ranks(on_rank, 2, schedule, lambda number: Stage(number, hooked)))
    assert fired == dict.fromkeys(range(3), len(ROWS) * (num_stages - 1))


@pytest.mark.parametrize("entry", ["stream", "step"])
@pytest.mark.parametrize("schedule", SPLITTING)
def test_post_accumulate_hooks_fire_once_per_microbatch_though_the_backward_is_split(schedule: str, entry: str) -> None:
    """See pytorch issue 144530: asking for gradients fires no hooks, on which data parallel wrappers rely."""
    fired: Counter[str] = Counter()

    def on_rank(rank: Rank) -> list[str]:
        names = []
        for number, stage in rank.stages.items():
            for name, parameter in stage.named_parameters():
                names.append(f"{number} {name}")
                parameter.register_post_accumulate_grad_hook(lambda _, name=names[-1]: fired.update([name]))
        if entry == "step":
            rank.pipeline.step(batch(ROWS), loss_of)
        else:
            for item in rank.pipeline.stream(batch(ROWS)):
                loss_of(item.outputs, item.index).backward()
        return names

    names = [name for names in on_ranks(on_rank, 2, schedule, Stage) for name in names]
    assert fired == dict.fromkeys(names, len(ROWS))


@pytest.mark.parametrize("schedule", SPLITTING)
def test_a_custom_backward_runs_once_though_the_backward_is_split(schedule: str) -> None:
    """See pytorch issue 166577: the second half runs a custom function's backward again, on tensors that are freed."""

    def on_rank(rank: Rank) -> list[int]:
        for item in rank.pipeline.stream(batch(ROWS)):
            loss_of(item.outputs, item.index).backward()
        rank.pipeline.flush()
        return [stage.counts["custom backward"] for stage in rank.stages.values()]

    found = on_ranks(on_rank, 2, schedule, lambda number: stage_of_kind("custom", number))
    assert [count for counts in found for count in counts] == [len(ROWS)] * sum(map(len, found))


@pytest.mark.parametrize("schedule", SPLITTING)
def test_weight_gradients_behind_a_node_with_several_outputs_are_right(schedule: str) -> None:
    """See pytorch issue 170277: gradients of all outputs of a node are added and given to its first."""

    def chunked(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        left, right = layer(x).chunk(2, dim=-1)
        return torch.cat([left * 2, right.sin() * left], dim=-1)

    check_against_one_process(schedule, chunked)


@pytest.mark.parametrize("schedule", SPLITTING)
def test_a_weight_that_is_used_twice_in_a_row_gets_its_gradient_once(schedule: str) -> None:
    """See pytorch issue 180952: uses of one weight that lie behind each other are counted double."""
    check_against_one_process(schedule, lambda layer, x: x @ layer.weight @ layer.weight + layer.bias)


@pytest.mark.parametrize("schedule", pe.SCHEDULES)
def test_gradients_with_stride_0_are_sent_right(schedule: str) -> None:
    """The gradient of a sum or of a mean is one number with strides of 0; buffers of it cannot be sent as they are."""

    def summed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x).sum(0).expand(2, WIDTH)  # type: ignore[no-any-return]

    check_against_one_process(schedule, summed)

    def on_rank(rank: Rank) -> torch.Tensor | None:
        for item in rank.pipeline.stream(batch(ROWS)):
            item.outputs.sum().backward()
        rank.pipeline.flush()
        return next(iter(rank.stages.values())).layer.bias.grad  # type: ignore[no-any-return]

    for grad in on_ranks(on_rank, 2, schedule, Stage):
        assert grad is not None and grad.count_nonzero() == WIDTH


@pytest.mark.parametrize("schedule", pe.SCHEDULES)
def test_stages_that_return_views_can_be_trained(schedule: str) -> None:
    """See pytorch issue 142229: outputs are detached in place after their backward, which views refuse."""
    check_against_one_process(schedule, lambda layer, x: layer(x.view(-1, WIDTH)).view(2, -1)[:, :WIDTH])


@pytest.mark.parametrize("schedule", pe.SCHEDULES)
def test_evaluation_may_come_before_training(schedule: str) -> None:
    """See pytorch issue 162822: what a backward needs is prepared by the first call only, which had none."""

    def on_rank(rank: Rank) -> Any:
        for stage in rank.stages.values():
            stage.eval()
        with torch.no_grad():
            before = [item.outputs for item in rank.pipeline.stream(batch(ROWS))]
        assert not any(output.requires_grad for output in before)
        for stage in rank.stages.values():
            stage.train()
        after = []
        for item in rank.pipeline.stream(batch(ROWS)):
            after.append(item.outputs)
            loss_of(item.outputs, item.index).backward()
        rank.pipeline.flush()
        assert all(map(torch.equal, before, after))
        return [gradients_of(stage).keys() for stage in rank.stages.values()]

    for rank in on_ranks(on_rank, 2, schedule, Stage):
        assert all(len(names) == 2 for names in rank)


@pytest.mark.parametrize("schedule", pe.SCHEDULES)
def test_stages_hand_on_integers_and_masks(schedule: str) -> None:
    """See pytorch issue 183024: everything that is received is made to require a gradient, which integers cannot."""

    def on_rank(rank: Rank) -> None:
        data = [
            pe.Microbatch(({"h": torch.ones(2, WIDTH), "ids": torch.arange(2), "mask": torch.tensor([True, False])},))
            for _ in range(3)
        ]
        for item in rank.pipeline.stream(data):
            assert item.outputs["ids"].tolist() == [0, 1] and item.outputs["mask"].dtype == torch.bool
            assert item.outputs["h"].requires_grad and not item.outputs["ids"].requires_grad
            item.outputs["h"].sum().backward()
        rank.pipeline.flush()
        assert all(stage.layer.weight.grad is not None for stage in rank.stages.values())

    def stage(layer: nn.Module, given: Any) -> Any:
        return {**given, "h": layer(given["h"]) * given["mask"][:, None] + given["ids"][:, None]}

    on_ranks(on_rank, 2, schedule, lambda number: Stage(number, stage))


class Leaving(nn.Module):
    """A stage whose output's memory is scribbled over and let go as soon as the next microbatch comes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer = linear(number)
        self.alive: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor, *, number: int) -> torch.Tensor:
        for earlier in self.alive:
            if (tensor := earlier()) is not None:
                tensor.detach().fill_(float("nan"))
        y = self.layer(x) * 1.0
        self.alive = [weakref.ref(y)]
        return y


def leave_in_process(rank: int) -> Any:
    rows = [200, 200, 200, 1]  # messages of two parts, which are on their way for a while

    def make(number: int) -> Leaving:
        return Leaving(number)

    graph = pe.StageGraph.chain(2, 2)
    stage = make(rank)
    with pe.Pipeline({rank: stage}, graph=graph, schedule="gpipe", transport=pe.TorchTransport()) as pipeline:
        outputs = []
        for output in pipeline.forward(batch(rows)):
            outputs.append(output.detach().clone())
            gc.collect()
    expected = []
    for each in batch(rows):
        x = each.inputs[0]
        for number in range(2):
            x = linear(number)(x) * 1.0
        expected.append(x.detach())
    return [torch.equal(left, right) for left, right in zip(outputs, expected, strict=True)]


def test_memory_that_is_freed_or_overwritten_before_a_send_has_ended_is_not_what_arrives() -> None:
    """A send reads its tensor late; what was changed or freed meanwhile arrives as garbage."""
    for rank in run_in_processes(leave_in_process, 2):
        assert not isinstance(rank, Crash), rank
        assert rank == [True] * 4


@pytest.mark.parametrize("schedule, placement", [("1f1b", "straight"), ("zb-v", "vee")])
def test_an_embedding_tied_to_the_head_takes_the_steps_of_one_process(schedule: str, placement: Any) -> None:
    """See pytorch issue 51931: first and last layer share a weight, whose gradients are added before a step."""
    num_stages = 3 if placement == "straight" else 6
    tokens = [torch.arange(length) % WIDTH for length in (3, 1, 5)]

    def functions(weights: list[nn.Parameter]) -> list[Any]:
        inner = [lambda x, w=weight: torch.tanh(x @ w) for weight in weights[1:-1]]
        return [lambda ids: weights[0][ids], *inner, lambda x: x @ weights[-1].T]

    def weights() -> list[nn.Parameter]:
        made = [nn.Parameter(linear(number).weight.detach().clone()) for number in range(num_stages - 1)]
        return [*made, nn.Parameter(made[0].detach().clone())]

    def on_rank(transport: Transport) -> dict[int, torch.Tensor]:
        graph = pe.StageGraph.chain(num_stages, 3, placement)
        every = weights()
        own = {stage: every[stage] for stage in graph.stages_of(transport.rank)}
        stages = {stage: functions(every)[stage] for stage in own}
        tied = {stage: weight for stage, weight in own.items() if stage in (0, num_stages - 1)}
        ties = [pe.tie("embedding", tied)] if tied else []
        optimizer = torch.optim.SGD(own.values(), lr=0.1)
        with pe.Pipeline(
            stages, graph=graph, schedule=schedule, transport=transport, deadline=DEADLINE, ties=ties
        ) as pipeline:
            for _ in range(3):
                for item in pipeline.stream([pe.Microbatch((ids,)) for ids in tokens]):
                    loss_of(item.outputs, item.index).backward()
                pipeline.flush()
                optimizer.step()
                optimizer.zero_grad()
        return {stage: weight.detach() for stage, weight in own.items()}

    found = {stage: weight for rank in run_ranks_in_threads(on_rank, 3) for stage, weight in rank.items()}
    expected = weights()[:-1]
    model, optimizer = functions([*expected, expected[0]]), torch.optim.SGD(expected, lr=0.1)
    for _ in range(3):
        for number, ids in enumerate(tokens):
            value: Any = ids
            for stage in model:
                value = stage(value)
            loss_of(value, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(found[0], found[num_stages - 1])
    for stage, weight in enumerate(expected):
        torch.testing.assert_close(found[stage], weight.detach(), rtol=1e-5, atol=1e-5)
