"""At a cut autograd behaves as if there were none: random models, aliases, buffers that are used again, counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import nn

import pipeline_engine as pe
from pipeline_engine.run.cargo import flatten
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.testing import run_ranks_in_threads
from tests.oracles.plain import Gradients, gradients_of, run_plain
from tests.run.counting import Products, stage_of_kind
from tests.run.mixtures import Mixture, loss_of_tree, mixtures
from tests.run.playing import DEADLINE, WIDTH, Rank, loss_of, on_ranks, total

Seen = tuple[dict[int, Any], dict[int, Gradients], list[torch.Tensor | None]]


def play(mixture: Mixture, transport: Transport) -> Seen:
    """Outputs (or losses) by microbatch, gradients by stage, and those of the first inputs, as one rank sees them."""
    stages = {number: mixture.stage(number) for number in mixture.graph.stages_of(transport.rank)}
    batch = mixture.batch()
    with pe.Pipeline(
        stages, graph=mixture.graph, schedule=mixture.schedule, transport=transport, deadline=DEADLINE
    ) as pipeline:
        if mixture.entry == "step":
            outputs = dict(enumerate(pipeline.step(batch, loss_of_tree)))
        elif mixture.entry == "forward":
            outputs = dict(enumerate(pipeline.forward(batch)))
            losses = [loss_of_tree(output, number) for number, output in outputs.items()]
            if torch.stack(losses).requires_grad:
                torch.stack(losses).sum().backward()
        else:
            outputs = {}
            for item in pipeline.stream(batch):
                outputs[item.index] = item.outputs
                loss = loss_of_tree(item.outputs, item.index)
                if loss.requires_grad:
                    loss.backward()
        pipeline.flush()
    return outputs, {number: gradients_of(stage) for number, stage in stages.items()}, [m.inputs[0].grad for m in batch]


def check_alike(left: Any, right: Any) -> None:
    """The same structure, and tensors alike in everything that a caller can see."""
    (mine, structure), (theirs, expected) = flatten(left), flatten(right)
    assert structure == expected
    for one, other in zip(mine, theirs, strict=True):
        if not isinstance(other, torch.Tensor):
            assert one == other
            continue
        assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        assert torch.equal(one, other) and not one._is_view()
    assert [[a is b for a in mine] for b in mine] == [[a is b for a in theirs] for b in theirs]


def close(found: torch.Tensor | None, expected: torch.Tensor | None, precision: float = 1e-6) -> bool:
    """Equal to ``precision`` times the larger of one and the gradient's norm."""
    if found is None or expected is None:
        return found is expected
    return float((found - expected).norm()) <= precision * max(1.0, float(expected.norm()))


def judge(mixture: Mixture, bfloat16: float = 1e-6) -> None:
    """Args: bfloat16: how precisely gradients are added up where a stage returns a tensor of this kind."""
    truth, inputs = mixture.plain()
    close_by = partial(close, precision=bfloat16 if mixture.has("bfloat16") else 1e-6)
    for rank, (outputs, gradients, input_grads) in enumerate(
        run_ranks_in_threads(lambda transport: play(mixture, transport), mixture.graph.num_ranks)
    ):
        expected = truth.losses if mixture.entry == "step" else truth.outputs
        for number, output in outputs.items():
            check_alike(output, expected[number])
        for number, found in gradients.items():
            summed = truth.summed(number, range(len(mixture.rows)))
            assert found.keys() == summed.keys(), f"stage {number}"
            assert all(close_by(grad, summed[name]) for name, grad in found.items()), f"stage {number}"
        if rank == mixture.graph.rank_of[0]:
            assert all(map(close_by, input_grads, inputs))


@settings(max_examples=60)
@given(mixtures(chains=True))
def test_whatever_stages_return_a_chain_of_them_does_what_one_process_does(mixture: Mixture) -> None:
    judge(mixture)


@settings(max_examples=60)
@given(mixtures(chains=False))
def test_whatever_stages_return_any_graph_of_them_does_what_one_process_does(mixture: Mixture) -> None:
    judge(
        mixture, bfloat16=torch.finfo(torch.bfloat16).eps
    )  # three gradients meet in another order than in one process


# Values that a stage or the caller goes on using.


class Reusing(nn.Module):
    """A stage that writes every output into one buffer, which its next microbatch overwrites."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(number))
        self.buffer = torch.zeros(2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Into.apply(self.linear(x), self.buffer)  # type: ignore[no-untyped-call,no-any-return]


class Into(torch.autograd.Function):
    """A copy into a buffer; what is returned shares the buffer's memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.copy_(x).detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


@pytest.mark.parametrize("entry", ["stream", "forward", "step"])
@pytest.mark.parametrize("schedule", pe.SCHEDULES)
def test_an_output_that_the_next_microbatch_overwrites_arrives_as_it_was(schedule: str, entry: str) -> None:
    inputs = [torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(m)) for m in range(5)]

    def on_rank(rank: Rank) -> Any:
        batch = [pe.Microbatch((x,)) for x in inputs]
        if entry == "step":
            outputs = rank.pipeline.step(batch, loss_of)
        elif entry == "forward":
            outputs = rank.pipeline.forward(batch)
            total(map(loss_of, outputs, range(5))).backward()
        else:
            outputs = []
            for item in rank.pipeline.stream(batch):
                outputs.append(item.outputs)
                loss_of(item.outputs, item.index).backward()
        rank.pipeline.flush()
        return outputs, {number: gradients_of(stage) for number, stage in rank.stages.items()}

    ranks = on_ranks(on_rank, 2, schedule, Reusing)
    stages = [Reusing(number) for number in range(sum(len(gradients) for _, gradients in ranks))]
    truth = run_plain(stages, [(x,) for x in inputs], [{}] * 5, loss_of)
    for outputs, gradients in ranks:
        for output, expected in zip(outputs, truth.losses if entry == "step" else truth.outputs, strict=True):
            assert torch.equal(output, expected)
        for number, found in gradients.items():
            for name, grad in truth.summed(number, range(5)).items():
                torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rank_of", [[0, 0, 0], [0, 1, 1], [0, 0, 1], [0, 1, 0], [0, 1, 2]])
def test_a_stage_may_change_what_it_received_though_others_receive_it_too(rank_of: list[int]) -> None:
    """Each consumer has a tensor of its own, also on one rank, also if the producer needs its output's old values."""
    graph = pe.StageGraph([(0, 1), (0, 2), (1, 2)], rank_of)
    weights = [torch.full((WIDTH,), 0.5 + number, requires_grad=True) for number in range(3)]
    x = torch.linspace(-1, 1, WIDTH).repeat(2, 1)
    stages: list[Callable[..., torch.Tensor]] = [
        lambda x: torch.tanh(x * weights[0]),
        lambda h: h.mul_(weights[1]).sin_(),
        lambda h, g: h.add_(1).mul_(weights[2]) + g.exp_(),
    ]

    def on_rank(transport: Transport) -> torch.Tensor:
        own = {stage: stages[stage] for stage in graph.stages_of(transport.rank)}
        with pe.Pipeline(own, graph=graph, schedule="gpipe", transport=transport, deadline=DEADLINE) as pipeline:
            (item,) = pipeline.stream([pe.Microbatch((x,))])
            item.outputs.sum().backward()
        return item.outputs  # type: ignore[no-any-return]

    outputs = run_ranks_in_threads(on_rank, graph.num_ranks)
    found = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    h = torch.tanh(x * weights[0])
    y = (h + 1) * weights[2] + (h * weights[1]).sin().exp()
    y.sum().backward()
    assert all(torch.equal(output, y) for output in outputs)
    for grad, weight in zip(found, weights, strict=True):
        torch.testing.assert_close(grad, weight.grad, rtol=1e-6, atol=1e-6)


def seen_by_one_stage(first: Callable[[torch.Tensor], Any], second: Callable[[Any], torch.Tensor]) -> Any:
    """Two ranks; returns the gradient of the first one's input, by a pipeline and without."""
    x = torch.linspace(-1, 1, 6 * WIDTH).view(6, WIDTH)

    def on_rank(transport: Transport) -> Any:
        own, stage = x.clone().requires_grad_(), [first, second][transport.rank]
        graph = pe.StageGraph.chain(2, 2)
        with pe.Pipeline({transport.rank: stage}, graph=graph, schedule="1f1b", transport=transport) as pipeline:
            (item,) = pipeline.stream([pe.Microbatch((own,))])
            item.outputs.square().sum().backward()
        return item.outputs, own.grad

    (output, found), _ = run_ranks_in_threads(on_rank, 2)
    own = x.clone().requires_grad_()
    y = second(first(own))
    y.square().sum().backward()
    assert torch.equal(output, y) and own.grad is not None
    return found, own.grad


VALUES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "one tensor twice, changed in one place": (
        lambda x: (lambda y: [y, {"again": y}])(x * 2),
        lambda t: t[0].mul_(3) + t[1]["again"],
    ),
    "the input as it is": (lambda x: (x, x), lambda t: t[0] * t[1]),
    "outputs that share memory": (lambda x: (lambda y: (y, y[1:], y.T))(x * 2), lambda t: t[0][1:] * t[1] + t[2].T[1:]),
    "a tensor with repetitions": (lambda x: (x * 2)[:1].expand(5, WIDTH), lambda y: y * y),
    "a tensor with gaps": (lambda x: (x * 2)[::2, 1::3], lambda y: y.reshape(-1) * 2),
    "another order of dimensions": (lambda x: (x * 2).T, lambda y: y @ y.T),
    "a number": (lambda x: x.sum(), lambda y: y * y),
    "nothing": (lambda x: (x[:0] * 2, x * 3), lambda t: t[0].sum() + t[1]),
    "a chain of views": (lambda x: (x * 2).view(2, 3, WIDTH).transpose(0, 1)[1:], lambda y: y.sin()),
    "pieces of one tensor": (lambda x: (x * 2).chunk(3), lambda t: t[0] * t[2] + t[1].detach()),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_crosses_a_cut_as_if_there_were_none(name: str) -> None:
    found, expected = seen_by_one_stage(*VALUES[name])
    assert torch.equal(found, expected)


def test_a_transposed_output_arrives_transposed_in_memory() -> None:
    seen: list[tuple[int, ...]] = []

    def second(y: torch.Tensor) -> torch.Tensor:
        seen.append(y.stride())
        return y * 1

    seen_by_one_stage(lambda x: (x * 2).T, second)
    assert seen == [(1, WIDTH), (1, WIDTH)]


# How often things happen.


@pytest.mark.parametrize("entry", ["stream", "forward", "step"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "looped-bfs"])
@pytest.mark.parametrize("kind", ["mlp", "recomputed", "custom"])
def test_everything_happens_as_often_as_without_a_pipeline(kind: str, schedule: str, entry: str) -> None:
    """Schedules with whole backwards; those with two halves are counted in test_split."""
    inputs = [torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(m)) for m in range(4)]

    def on_rank(rank: Rank) -> dict[int, Counter[str]]:
        batch = [pe.Microbatch((x,)) for x in inputs]
        if entry == "step":
            rank.pipeline.step(batch, loss_of)
        elif entry == "forward":
            total(map(loss_of, rank.pipeline.forward(batch), range(4))).backward()
        else:
            for item in rank.pipeline.stream(batch):
                loss_of(item.outputs, item.index).backward()
        rank.pipeline.flush()
        return {number: stage.counts for number, stage in rank.stages.items()}

    ranks = on_ranks(on_rank, 2, schedule, lambda number: stage_of_kind(kind, number))
    stages = [stage_of_kind(kind, number) for number in range(sum(map(len, ranks)))]
    for number, x in enumerate(inputs):
        value: Any = x
        for stage in stages:
            value = stage(value)
        loss_of(value, number).backward()
    assert list(ranks) == [{number: stages[number].counts for number in counts} for counts in ranks]


def test_products_are_as_many_as_without_a_pipeline() -> None:
    """On one rank, where a dispatch mode sees everything."""
    inputs = [torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(m)) for m in range(4)]
    for schedule in pe.SCHEDULES:
        counts: Counter[str] = Counter()

        def on_rank(rank: Rank, counts: Counter[str] = counts) -> int:
            with Products(counts):
                for item in rank.pipeline.stream([pe.Microbatch((x,)) for x in inputs]):
                    loss_of(item.outputs, item.index).backward()
                rank.pipeline.flush()
            return len(rank.stages)

        (num_stages,) = on_ranks(on_rank, 1, schedule, lambda number: stage_of_kind("attention", number))
        plain: Counter[str] = Counter()
        stages = [stage_of_kind("attention", number) for number in range(num_stages)]
        with Products(plain):
            for number, x in enumerate(inputs):
                value: Any = x
                for stage in stages:
                    value = stage(value)
                loss_of(value, number).backward()
        assert counts == plain, schedule


def test_tensors_that_share_memory_arrive_apart() -> None:
    """What a next stage writes to one of them is not seen in the other.  Here a cut shows: in one process it is."""
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))

    def views(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = weight * x
        return y, y[1:]

    def changed(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        whole, part = pair
        return whole.mul_(3), part * part

    def on_rank(transport: Transport) -> list[list[float]]:
        graph, stages = pe.StageGraph.chain(2, 2), {transport.rank: [views, changed][transport.rank]}
        with pe.Pipeline(stages, graph=graph, schedule="1f1b", transport=transport, deadline=DEADLINE) as pipeline:
            ((whole, part),) = pipeline.forward([pe.Microbatch((torch.ones(2),))])
            (whole.sum() + part.sum()).backward()
        return [whole.tolist(), part.tolist()]

    assert run_ranks_in_threads(on_rank, 2) == [[[3.0, 6.0], [4.0]]] * 2
    assert weight.grad is not None and weight.grad.tolist() == [3.0, 7.0]
