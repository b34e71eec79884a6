"""Plays callers on real pipelines.  Stages and hooks record what happened, the oracle says what must come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from attrs import field, frozen
from torch import nn

import pipeline_engine as pe
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.testing import run_ranks_in_threads
from tests.oracles.plain import Gradients, Plain, gradients_of, run_plain
from tests.strategies import Ask, Event, Finish, Give, Skip

T = TypeVar("T")
WIDTH = 8
DEADLINE = 20.0  # seconds
ROWS = [3, 1, 4, 2, 200]
"""Rows of five microbatches; the last one's messages have two parts."""


class Layer(nn.Module):
    """A stage that records its forwards and, by a hook on its output's gradient, its backwards."""

    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / 3)
        self.bias = nn.Parameter(torch.randn(WIDTH, generator=generator) / 3)
        self.number = number
        self.log: list[str] = []

    def forward(self, x: torch.Tensor, *, number: int = 0) -> torch.Tensor:
        self.log.append(f"{self.number}F{number}")
        y = torch.tanh(x @ self.weight + self.bias)
        if y.requires_grad:
            y.register_hook(lambda _: self.log.append(f"{self.number}B{number}"))
        return y


def batch(rows: Sequence[int]) -> list[pe.Microbatch]:
    """Microbatches of these numbers of rows; every stage is told the number of the microbatch."""
    generator = torch.Generator().manual_seed(sum(rows))
    return [
        pe.Microbatch((torch.randn(count, WIDTH, generator=generator),), {"number": number})
        for number, count in enumerate(rows)
    ]


def loss_of(outputs: torch.Tensor, number: int) -> torch.Tensor:
    return ((number + 1) * outputs).sin().square().sum()


def plain(stages: Sequence[nn.Module], microbatches: Sequence[pe.Microbatch]) -> Plain:
    """The same in one process."""
    inputs, shared = [each.inputs for each in microbatches], [each.shared for each in microbatches]
    return run_plain(stages, inputs, shared, loss_of)


def pipeline_on(
    transport: Transport, stage: Callable[..., Any], schedule: str | pe.Schedule = "1f1b", deadline: float = DEADLINE
) -> pe.Pipeline:
    """A straight chain, one stage a rank."""
    graph = pe.StageGraph.chain(transport.num_ranks, transport.num_ranks)
    return pe.Pipeline({transport.rank: stage}, graph=graph, schedule=schedule, transport=transport, deadline=deadline)


def on_pipelines(
    function: Callable[[pe.Pipeline, Layer], T],
    num_ranks: int = 2,
    schedule: str | pe.Schedule = "1f1b",
    make_stage: Callable[[int], nn.Module] = Layer,
) -> list[T]:
    """``function(pipeline, stage)`` on every rank, in threads; the pipeline is closed afterwards."""

    def on_rank(transport: Transport) -> T:
        stage = make_stage(transport.rank)
        with pipeline_on(transport, stage, schedule) as pipeline:
            return function(pipeline, stage)  # type: ignore[arg-type]

    return run_ranks_in_threads(on_rank, num_ranks)


# Cases that are played as a whole, in threads and in processes.


@frozen
class Case:
    """A caller and what he works on; ``entry`` is the method that he uses."""

    schedule: str
    num_ranks: int
    rows: tuple[int, ...] = field(converter=tuple)
    entry: str
    events: tuple[Event, ...] = field(converter=tuple)

    @property
    def given(self) -> set[int]:
        """Microbatches whose gradient the caller gives."""
        if self.entry == "step":
            return set(range(len(self.rows)))
        return {number for event in self.events if isinstance(event, Give) for number in event.microbatches}


@frozen
class Played:
    """What one rank saw: outputs (or losses) by microbatch, its gradients, and its stage's record."""

    outputs: dict[int, torch.Tensor]
    gradients: Gradients
    log: list[str]

    @property
    def order(self) -> list[int]:
        """Microbatches in the order of their backwards."""
        return [int(entry.partition("B")[2]) for entry in self.log if "B" in entry]


def play(case: Case, pipeline: pe.Pipeline, stage: Layer) -> Played:
    """Play a case on one rank, up to and including the flush."""
    stage.zero_grad(set_to_none=True)
    stage.log.clear()
    microbatches = batch(case.rows)
    if case.entry == "step":
        outputs = dict(enumerate(pipeline.step(microbatches, loss_of)))
    else:
        outputs = _listen(case, pipeline, microbatches)
    pipeline.flush()
    return Played(outputs, {name: grad.clone() for name, grad in gradients_of(stage).items()}, list(stage.log))


def _listen(case: Case, pipeline: pe.Pipeline, microbatches: list[pe.Microbatch]) -> dict[int, torch.Tensor]:
    seen: dict[int, torch.Tensor] = {}
    held: dict[int, Any] = {}
    if case.entry == "forward":
        held = dict(enumerate(pipeline.forward(microbatches)))
        seen = {number: output.detach().clone() for number, output in held.items()}
        items = iter(())
    else:
        items = pipeline.stream(microbatches)  # type: ignore[assignment]
    for event in case.events:
        match event:
            case Ask(number) if case.entry == "stream":
                held[number] = next(items)
                seen[number] = held[number].outputs.detach().clone()
            case Give(numbers):
                losses = [loss_of(getattr(held[number], "outputs", held[number]), number) for number in numbers]
                sum(losses[1:], start=losses[0]).backward()  # type: ignore[no-untyped-call]
            case Skip(number) if case.entry == "stream":
                pipeline.skip(held[number])
            case Finish() if case.entry == "stream":
                assert next(items, None) is None
    return seen


def judge(case: Case, ranks: Sequence[Played]) -> None:
    """Hold what all ranks saw against plain autograd, bit for bit."""
    truth = plain([Layer(rank) for rank in range(case.num_ranks)], batch(case.rows))
    expected = truth.losses if case.entry == "step" else truth.outputs
    for rank, played in enumerate(ranks):
        where = f"rank {rank} of {case}"
        assert sorted(played.order) == sorted(case.given), where
        assert played.outputs.keys() == ranks[0].outputs.keys(), where
        for number, output in played.outputs.items():
            assert torch.equal(output, expected[number]), f"output {number} on {where}"
        gradients = truth.summed(rank, played.order)
        assert gradients.keys() == played.gradients.keys(), where
        for name, grad in gradients.items():
            assert torch.equal(played.gradients[name], grad), f"{name}.grad on {where}"


def judged(pipeline: pe.Pipeline, stage: Layer, order: list[int], rows: list[int]) -> None:
    """This rank's gradients are those of the microbatches of ``order``."""
    pipeline.flush()
    layers = [Layer(rank) for rank in range(stage.number + 1)]
    while len(layers) < pipeline._graph.num_ranks:
        layers.append(Layer(len(layers)))
    expected = plain(layers, batch(rows)).summed(stage.number, order)
    found = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.equal(found[name], grad), name
