"""The executor performs the program as it is written, keeps no more alive than it says, and fails with everyone."""

from __future__ import annotations

import gc
import weakref
from operator import le
from time import monotonic
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.plan.actions import BackwardWeight
from pipeline_engine.testing import run_ranks_in_threads
from tests.run.playing import ROWS, Case, Layer, Rank, batch, judge, loss_of, on_ranks, play_all
from tests.run.processes import Crash, run_in_processes
from tests.strategies import chain_for, one_by_one, schedule_names

# The order, as the stages saw it.


@settings(max_examples=60)
@given(schedule_names, st.integers(1, 4), st.lists(st.integers(0, 3), max_size=9), st.sampled_from(["stream", "step"]))
def test_what_the_stages_saw_is_the_program(name: str, num_ranks: int, rows: list[int], entry: str) -> None:
    """Forwards by the stage itself, backwards by a hook on its output; the caller gives each gradient at once."""
    case = Case(name, num_ranks, rows, entry, one_by_one(len(rows)))
    ranks = run_ranks_in_threads(lambda transport: play_all([case], transport)[0], num_ranks)
    judge(case, ranks)
    assert [played.log for played in ranks] == visible(pe.build(name, chain_for(name, num_ranks), len(rows)))


def visible(schedule: pe.Schedule) -> list[list[str]]:
    """What of a program can be seen from inside a stage: the hook fires in the first half of a split backward."""
    return [
        [str(action).replace("I", "B") for action in program if not isinstance(action, BackwardWeight)]
        for program in schedule.programs
    ]


# Memory.


class Token:
    """Something that lives exactly as long as the graph it hangs on."""


class Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: Token) -> torch.Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class Watched(Layer):
    """A stage that counts how many of its graphs are alive whenever one is added."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.alive: weakref.WeakSet[Token] = weakref.WeakSet()
        self.counts: list[int] = []

    def forward(self, x: torch.Tensor, *, number: int = 0) -> torch.Tensor:
        token = Token()
        self.alive.add(token)
        self.counts.append(len(self.alive))
        return Held.apply(super().forward(x, number=number), token)  # type: ignore[no-any-return]


def watched_together(rank: Rank) -> Watched:
    """Have all stages of a rank count together."""
    first, *others = rank.stages.values()
    for other in others:
        other.alive, other.counts = first.alive, first.counts
    return first  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", pe.SCHEDULES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_graphs_alive_at_once_are_as_many_as_the_simulator_says(schedule: str, num_ranks: int) -> None:
    def on_rank(rank: Rank) -> int:
        watched = watched_together(rank)
        rank.train([2] * 9)
        return max(watched.counts)

    built = pe.build(schedule, chain_for(schedule, num_ranks), 9)
    expected = pe.simulate(built, pe.Costs()).peak_in_flight
    found = tuple(on_ranks(on_rank, num_ranks, schedule, Watched))
    if any(isinstance(action, BackwardWeight) for program in built.programs for action in program):
        assert all(map(le, found, expected)), f"{found} is more than {expected}"  # the token goes with the first half
    else:
        assert found == expected


@pytest.mark.parametrize("schedule", pe.SCHEDULES)
@pytest.mark.parametrize("give", [True, False])
def test_after_a_flush_no_graph_of_a_stage_is_alive_though_the_outputs_are(give: bool, schedule: str) -> None:
    def on_rank(rank: Rank) -> int:
        watched, kept = watched_together(rank), []
        for item in rank.pipeline.stream(batch(ROWS)):
            kept.append(item.outputs)
            if give:
                loss_of(item.outputs, item.index).backward()
        kept += rank.pipeline.forward(batch(ROWS))
        rank.pipeline.flush()
        gc.collect()
        assert len(kept) == 2 * len(ROWS)
        return len(watched.alive)

    assert on_ranks(on_rank, 3, schedule, Watched) == [0, 0, 0]


def test_a_skipped_item_is_freed_at_once() -> None:
    """What is left is what ran ahead."""

    def on_rank(rank: Rank) -> list[int]:
        alive = []
        for item in rank.pipeline.stream(batch(ROWS)):
            rank.pipeline.skip(item)
            gc.collect()
            alive.append(len(rank.stage.alive))
        return alive

    for number, alive in enumerate(on_ranks(on_rank, 3, "1f1b", Watched)):
        assert max(alive) <= 2 - number, f"rank {number}: {alive}"


def test_without_gradients_no_graph_is_kept() -> None:
    @torch.no_grad()
    def on_rank(rank: Rank) -> int:
        list(rank.pipeline.stream(batch(ROWS)))
        return max(rank.stage.counts)

    assert on_ranks(on_rank, 3, "gpipe", Watched) == [1, 1, 1]


# Failures.


class Fragile(Layer):
    """Stage 1 breaks on microbatch 2, in its forward or its backward, while it is told to."""

    where = "nowhere"

    def forward(self, x: torch.Tensor, *, number: int = 0) -> torch.Tensor:
        y = super().forward(x, number=number)
        if (self.number, number) == (1, 2):
            if self.where == "forward":
                raise ZeroDivisionError("boom")
            if self.where == "backward":
                y.register_hook(self.break_down)
        return y

    def break_down(self, grad: torch.Tensor) -> None:
        raise ZeroDivisionError("boom")


FAILURES = [(where, entry) for where in ("forward", "backward") for entry in ("stream", "step")]
Survived = tuple[str, float, list[str]]


def survive(rank: Rank, where: str, entry: str) -> Survived:
    """Run into the failure, then train as if nothing had been; what was raised, after how many seconds, its notes."""
    rank.stage.where = where
    raised: BaseException | None = None
    began = monotonic()
    try:
        rank.train(ROWS) if entry == "stream" else rank.pipeline.step(batch(ROWS), loss_of)
        rank.pipeline.flush()
    except (ZeroDivisionError, pe.PeerFailedError) as error:
        raised = error
    seconds = monotonic() - began
    rank.stage.where = "nowhere"
    rank.zero_grad()
    rank.train(ROWS)
    rank.check_gradients(range(len(ROWS)), ROWS)
    return f"{type(raised).__name__}: {raised}", seconds, list(getattr(raised, "__notes__", []))


def judge_survivors(where: str, ranks: list[Survived]) -> None:
    action = f"1{where[0].upper()}2 ({where} of stage 1, microbatch 2)"
    peer = f"PeerFailedError: rank 1 failed while it performed {action}: ZeroDivisionError: boom"
    assert [told for told, _, _ in ranks] == [peer, "ZeroDivisionError: boom", peer]
    slowest = max(seconds for _, seconds, _ in ranks)
    print(f"{where}: every rank had raised {1000 * slowest:.0f} ms after the beginning of the call")
    assert slowest < 10
    assert any(f"while rank 1 performed {action}" in note for note in ranks[1][2])
    assert all(any("traceback of rank 1" in note and "boom" in note for note in ranks[peer][2]) for peer in (0, 2))


@pytest.mark.parametrize(("where", "entry"), FAILURES)
def test_a_stage_that_raises_stops_every_rank_and_the_pipeline_works_again(where: str, entry: str) -> None:
    judge_survivors(where, on_ranks(lambda rank: survive(rank, where, entry), 3, "1f1b", Fragile))


def survive_in_process(rank: int) -> list[Survived]:
    built = Rank(pe.TorchTransport(), "1f1b", Fragile)
    with built.pipeline:
        return [survive(built, where, entry) for where, entry in FAILURES]


def test_a_stage_that_raises_in_one_process_stops_every_process_and_the_pipeline_works_again() -> None:
    ranks = run_in_processes(survive_in_process, 3)
    for rank in ranks:
        assert not isinstance(rank, Crash), rank
    for index, (where, _) in enumerate(FAILURES):
        judge_survivors(where, [rank[index] for rank in ranks])


def test_a_loss_function_of_step_that_raises_stops_every_rank() -> None:
    def loss(outputs: torch.Tensor, number: int) -> torch.Tensor:
        raise ZeroDivisionError("in the loss")

    def on_rank(rank: Rank) -> str:
        with pytest.raises((ZeroDivisionError, pe.PeerFailedError), match="in the loss") as caught:
            rank.pipeline.step(batch(ROWS), loss)
        rank.train(ROWS)
        rank.check_gradients(range(len(ROWS)), ROWS)
        return type(caught.value).__name__

    assert on_ranks(on_rank, 3) == ["PeerFailedError", "PeerFailedError", "ZeroDivisionError"]
