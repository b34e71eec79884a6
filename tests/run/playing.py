"""Plays callers on real pipelines.  Stages and hooks record what happened, the oracle says what must come out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from attrs import field, frozen
from torch import nn

import pipeline_engine as pe
from pipeline_engine.plan.actions import BackwardWeight
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.testing import run_ranks_in_threads
from tests.oracles.plain import Gradients, Plain, gradients_of, run_plain
from tests.strategies import Ask, Event, Finish, Give, Skip, chain_for

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


def total(losses: Iterable[torch.Tensor]) -> torch.Tensor:
    """Their sum, as a tensor."""
    return torch.stack(list(losses)).sum()


def plain(num_stages: int, rows: Sequence[int]) -> Plain:
    """The same in one process."""
    microbatches = batch(rows)
    inputs, shared = [each.inputs for each in microbatches], [each.shared for each in microbatches]
    return run_plain([Layer(stage) for stage in range(num_stages)], inputs, shared, loss_of)


class Rank:
    """One rank of a pipeline: what it is built from, and what its stages recorded."""

    def __init__(
        self,
        transport: Transport,
        schedule: str | pe.Schedule = "1f1b",
        make_stage: Callable[[int], Any] = Layer,
        deadline: float = DEADLINE,
        **options: Any,
    ) -> None:
        name = "1f1b" if isinstance(schedule, pe.Schedule) else schedule
        self.number = transport.rank
        self.graph = chain_for(name if name in pe.SCHEDULES else "1f1b", transport.num_ranks)
        self.log: list[str] = []
        self.stages = {stage: make_stage(stage) for stage in self.graph.stages_of(self.number)}
        for stage in self.stages.values():
            stage.log = self.log
        self.pipeline = pe.Pipeline(
            self.stages, graph=self.graph, schedule=schedule, transport=transport, deadline=deadline, **options
        )

    @property
    def stage(self) -> Any:
        """The only stage of a rank that has one."""
        (stage,) = self.stages.values()
        return stage

    def zero_grad(self) -> None:
        for stage in self.stages.values():
            stage.zero_grad(set_to_none=True)

    def train(self, rows: Sequence[int]) -> None:
        """A plain pass over a stream."""
        for item in self.pipeline.stream(batch(rows)):
            loss_of(item.outputs, item.index).backward()

    def check_gradients(self, order: Iterable[int], rows: Sequence[int]) -> None:
        """After a flush the gradients are those of these microbatches of a batch, bit for bit."""
        self.pipeline.flush()
        order, truth = list(order), plain(self.graph.num_stages, rows)
        for number, stage in self.stages.items():
            expected, found = truth.summed(number, order), gradients_of(stage)
            assert found.keys() == expected.keys(), f"stage {number}"
            for name, grad in expected.items():
                assert torch.equal(found[name], grad), f"{name}.grad of stage {number}"


def on_ranks(
    function: Callable[[Rank], T],
    num_ranks: int = 2,
    schedule: str | pe.Schedule = "1f1b",
    make_stage: Callable[[int], Any] = Layer,
    **options: Any,
) -> list[T]:
    """``function(rank)`` on every rank, in threads; the pipeline is closed afterwards.  Options are the pipeline's."""

    def on_rank(transport: Transport) -> T:
        rank = Rank(transport, schedule, make_stage, **options)
        with rank.pipeline:
            return function(rank)

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
    def splits_backwards(self) -> bool:
        """Whether the schedule has backwards in two halves."""
        built = pe.build(self.schedule, chain_for(self.schedule, self.num_ranks), len(self.rows))
        return any(isinstance(action, BackwardWeight) for program in built.programs for action in program)

    @property
    def given(self) -> set[int]:
        """Microbatches whose gradient the caller gives."""
        if self.entry == "step":
            return set(range(len(self.rows)))
        return {number for event in self.events if isinstance(event, Give) for number in event.microbatches}


@frozen
class Played:
    """What one rank saw: outputs (or losses) by microbatch, gradients by stage, and its stages' record."""

    outputs: dict[int, torch.Tensor]
    gradients: dict[int, Gradients]
    log: list[str]

    def order(self, stage: int) -> list[int]:
        """Microbatches in the order of a stage's backwards."""
        pairs = [entry.split("B") for entry in self.log if "B" in entry]
        return [int(microbatch) for number, microbatch in pairs if int(number) == stage]


def play(case: Case, rank: Rank) -> Played:
    """Play a case on one rank, up to and including the flush."""
    rank.zero_grad()
    rank.log.clear()
    if case.entry == "step":
        outputs = dict(enumerate(rank.pipeline.step(batch(case.rows), loss_of)))
    else:
        outputs = _listen(case, rank.pipeline)
    rank.pipeline.flush()
    gradients = {
        number: {name: grad.clone() for name, grad in gradients_of(stage).items()}
        for number, stage in rank.stages.items()
    }
    return Played(outputs, gradients, list(rank.log))


def play_all(cases: Sequence[Case], transport: Transport) -> list[Played]:
    """Several cases of one schedule, one after the other on one pipeline."""
    rank = Rank(transport, cases[0].schedule)
    with rank.pipeline:
        return [play(case, rank) for case in cases]


def _listen(case: Case, pipeline: pe.Pipeline) -> dict[int, torch.Tensor]:
    seen: dict[int, torch.Tensor] = {}
    held: dict[int, Any] = {}
    items: Any = iter(())
    if case.entry == "forward":
        held = dict(enumerate(pipeline.forward(batch(case.rows))))
        seen = {number: output.detach().clone() for number, output in held.items()}
    else:
        items = pipeline.stream(batch(case.rows))
    for event in case.events:
        match event:
            case Ask(number) if case.entry == "stream":
                held[number] = next(items)
                seen[number] = held[number].outputs.detach().clone()
            case Give(numbers):
                total(loss_of(getattr(held[number], "outputs", held[number]), number) for number in numbers).backward()
            case Skip(number) if case.entry == "stream":
                pipeline.skip(held[number])
            case Finish() if case.entry == "stream":
                assert next(items, None) is None
    return seen


def judge(case: Case, ranks: Sequence[Played]) -> None:
    """Hold what all ranks saw against plain autograd, bit for bit."""
    graph = chain_for(case.schedule, case.num_ranks)
    truth = plain(graph.num_stages, case.rows)
    expected = truth.losses if case.entry == "step" else truth.outputs
    for rank, played in enumerate(ranks):
        where = f"rank {rank} of {case}"
        assert played.outputs.keys() == ranks[0].outputs.keys(), where
        for number, output in played.outputs.items():
            assert torch.equal(output, expected[number]), f"output {number} on {where}"
        for stage in graph.stages_of(rank):
            order = played.order(stage)
            assert sorted(order) == sorted(case.given), f"stage {stage} on {where}: backwards of {order}"
            gradients = truth.summed(stage, order)
            assert gradients.keys() == played.gradients[stage].keys(), f"stage {stage} on {where}"
            for name, grad in gradients.items():
                found = played.gradients[stage][name]
                if case.splits_backwards and order != sorted(order):  # second halves have an order that nobody sees
                    torch.testing.assert_close(found, grad, rtol=1e-5, atol=1e-4)
                else:
                    assert torch.equal(found, grad), f"{name}.grad of stage {stage} on {where}"
