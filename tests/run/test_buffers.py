"""Buffers that forwards change are, at every point where nothing runs ahead, those of a caller without a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn

import pipeline_engine as pe
from pipeline_engine.run.buffers import buffers_of
from tests.run.playing import WIDTH, Layer, Rank, batch, loss_of, on_ranks
from tests.run.processes import Crash, run_in_processes
from tests.strategies import chain_for

ROWS = [3, 2, 4, 2, 5, 3]
RUN_AHEAD = [("1f1b", 3), *((name, 2) for name in sorted(pe.SCHEDULES))]
State = dict[str, torch.Tensor]


class Normed(nn.Module):
    """A stage with running statistics, a counter that is replaced, not changed, and a table that stays."""

    steps: torch.Tensor

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer, self.norm = Layer(number), nn.BatchNorm1d(WIDTH)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.table = nn.Module()
        self.table.register_buffer("rows", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, *, number: int = 0) -> torch.Tensor:
        if self.training:
            self.steps = self.steps + 1
        y: torch.Tensor = self.norm(self.layer(x)) * self.table.rows
        return y


def state_of(stage: nn.Module) -> State:
    return {name: value.clone() for name, value in stage.named_buffers()}


def without_pipeline(num_stages: int, seen: Iterable[int], rows: Sequence[int] = ROWS) -> list[State]:
    """Buffers of each stage after these microbatches, one after the other."""
    stages, microbatches = [Normed(number) for number in range(num_stages)], batch(rows)
    with torch.no_grad():
        for index in seen:
            (x,) = microbatches[index].inputs
            for stage in stages:
                x = stage(x)
    return [state_of(stage) for stage in stages]


def check(rank: Rank, seen: Iterable[int], rows: Sequence[int] = ROWS) -> None:
    expected = without_pipeline(rank.graph.num_stages, seen, rows)
    for number, stage in rank.stages.items():
        found = state_of(stage)
        assert found.keys() == expected[number].keys()
        for name, value in expected[number].items():
            assert torch.equal(found[name], value), f"{name} of stage {number}: {found[name]}, not {value}"


@pytest.mark.parametrize(("schedule", "num_ranks"), RUN_AHEAD)
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_after_a_break_buffers_have_seen_what_was_yielded(
    schedule: str, num_ranks: int, mode: type[AbstractContextManager[None]]
) -> None:
    def on_rank(rank: Rank) -> None:
        with mode():
            for item in rank.pipeline.stream(batch(ROWS)):
                if item.outputs.requires_grad:
                    loss_of(item.outputs, item.index).backward()
                if item.index == 1:
                    break
        rank.pipeline.flush()
        check(rank, [0, 1])
        with mode():
            for _ in rank.pipeline.stream(batch(ROWS)):
                pass
        rank.pipeline.flush()
        check(rank, [0, 1, *range(len(ROWS))])

    on_ranks(on_rank, num_ranks, schedule, Normed)


@pytest.mark.parametrize(("schedule", "num_ranks"), RUN_AHEAD)
def test_with_invalidate_each_turn_buffers_are_those_of_the_items_so_far(schedule: str, num_ranks: int) -> None:
    def on_rank(rank: Rank) -> None:
        for item in rank.pipeline.stream(batch(ROWS)):
            loss_of(item.outputs, item.index).backward()
            rank.pipeline.invalidate()
            check(rank, range(item.index + 1))

    on_ranks(on_rank, num_ranks, schedule, Normed)


def test_a_break_followed_by_other_calls_without_a_flush() -> None:
    def on_rank(rank: Rank) -> None:
        for turn in range(3):
            for item in rank.pipeline.stream(batch(ROWS)):
                loss_of(item.outputs, item.index).backward()
                if item.index == turn:
                    break
        rank.pipeline.forward(batch(ROWS[:2]))
        rank.pipeline.step(batch(ROWS), loss_of)
        rank.pipeline.flush()
        for stage in rank.stages.values():
            assert int(stage.norm.num_batches_tracked) == int(stage.steps) == 1 + 2 + 3 + 2 + len(ROWS)

    on_ranks(on_rank, 3, "1f1b", Normed)


def test_evaluation_in_between_changes_nothing_and_training_after_it_counts() -> None:
    def on_rank(rank: Rank) -> None:
        for training, seen in ((False, []), (True, [0, 1, 2]), (False, [0, 1, 2])):
            for stage in rank.stages.values():
                stage.train(training)
            for item in rank.pipeline.stream(batch(ROWS)):
                loss_of(item.outputs, item.index).backward()
                if item.index == 2:
                    break
            rank.pipeline.flush()
            check(rank, seen)

    on_ranks(on_rank, 2, "1f1b", Normed)


def test_buffers_that_the_caller_changed_are_his() -> None:
    def on_rank(rank: Rank) -> None:
        fresh = {number: state_of(Normed(number)) for number in rank.stages}
        for item in rank.pipeline.stream(batch(ROWS)):
            loss_of(item.outputs, item.index).backward()
            if item.index == 1:
                for number, stage in rank.stages.items():
                    stage.load_state_dict(fresh[number], strict=False)
                break
        rank.pipeline.flush()
        check(rank, [])

    on_ranks(on_rank, 3, "1f1b", Normed)


def test_after_a_failure_buffers_have_seen_what_was_yielded() -> None:
    def on_rank(rank: Rank) -> None:
        seen = []
        with pytest.raises((ValueError, pe.PeerFailedError)):
            for item in rank.pipeline.stream(batch(ROWS)):
                seen.append(item.index)
                loss_of(item.outputs, item.index).backward()
                if item.index == 1:
                    raise ValueError("enough")
        with pytest.raises((TypeError, pe.PeerFailedError)):
            for item in rank.pipeline.stream([*batch(ROWS)[:3], pe.Microbatch((None,), {"number": 3})]):
                seen.append(item.index)
        check(rank, seen)

    on_ranks(on_rank, 3, "1f1b", Normed)


def test_a_loop_in_a_loop_undoes_what_came_last_and_no_other_call() -> None:
    """What a dropped forward did before another call's forward stays: no values of any moment would be right."""

    def on_rank(rank: Rank) -> None:
        for item in rank.pipeline.stream(batch(ROWS)):
            loss_of(item.outputs, item.index).backward()
            ahead = {number: int(stage.steps) for number, stage in rank.stages.items()}
            with torch.no_grad():
                rank.pipeline.forward(batch(ROWS))
            break
        rank.pipeline.flush()
        for number, stage in rank.stages.items():
            assert int(stage.steps) == ahead[number] + len(ROWS)

    on_ranks(on_rank, 2, "1f1b", Normed)


def in_a_process(rank: int) -> list[State]:
    stages = {rank: Normed(rank)}
    with pe.Pipeline(stages, graph=chain_for("1f1b", 2), schedule="1f1b", transport=pe.TorchTransport()) as pipeline:
        for item in pipeline.stream(batch(ROWS)):
            loss_of(item.outputs, item.index).backward()
            if item.index == 1:
                break
    return [state_of(stages[rank])]


def test_in_processes_too() -> None:
    expected = without_pipeline(2, [0, 1])
    for rank, found in enumerate(run_in_processes(in_a_process, 2)):
        assert not isinstance(found, Crash), found
        assert all(torch.equal(found[0][name], value) for name, value in expected[rank].items())


def test_only_modules_with_buffers_are_followed() -> None:
    norm = nn.BatchNorm1d(3)
    assert list(buffers_of({0: nn.Linear(3, 3), 1: norm, 2: norm.forward})) == [1]
