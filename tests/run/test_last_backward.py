"""The last backward of a stage is announced just before it runs, whichever way the caller came there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pipeline_engine as pe
from pipeline_engine.plan.actions import BackwardInput
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.testing import run_ranks_in_threads
from tests.run.playing import DEADLINE, Layer, batch, loss_of, total
from tests.strategies import chain_for


def splits(schedule: str) -> bool:
    programs = pe.build(schedule, chain_for(schedule, 2), 1).programs
    return any(isinstance(action, BackwardInput) for program in programs for action in program)


ROWS = [3, 1, 4]
SPLIT = [name for name in pe.SCHEDULES if splits(name)]
WHOLE = [name for name in pe.SCHEDULES if not splits(name)]


def announced(schedule: str, call: Callable[[pe.Pipeline], object], num_ranks: int = 2) -> dict[int, list[str]]:
    """By stage: its gradients' arrivals, one for each microbatch, and the announcements between them."""

    def on_rank(transport: Transport) -> dict[int, list[str]]:
        graph = chain_for(schedule, num_ranks)
        stages = {number: Layer(number) for number in graph.stages_of(transport.rank)}
        events: dict[int, list[str]] = {number: [] for number in stages}
        for number, stage in stages.items():
            stage.weight.register_post_accumulate_grad_hook(lambda _, number=number: events[number].append("grad"))
        with pe.Pipeline(
            stages,
            graph=graph,
            schedule=schedule,
            transport=transport,
            deadline=DEADLINE,
            on_last_backward=lambda stage: events[stage].append("last"),
        ) as pipeline:
            call(pipeline)
        return events

    return {stage: events for rank in run_ranks_in_threads(on_rank, num_ranks) for stage, events in rank.items()}


def stream(pipeline: pe.Pipeline, skipped: tuple[int, ...] = ()) -> None:
    for item in pipeline.stream(batch(ROWS)):
        if item.index in skipped:
            pipeline.skip(item)
        else:
            loss_of(item.outputs, item.index).backward()


def forward(pipeline: pe.Pipeline) -> None:
    total(loss_of(outputs, number) for number, outputs in enumerate(pipeline.forward(batch(ROWS)))).backward()


def step(pipeline: pe.Pipeline) -> None:
    pipeline.step(batch(ROWS), loss_of)


@pytest.mark.parametrize("call", [stream, forward, step])
@pytest.mark.parametrize("schedule", WHOLE)
def test_it_is_announced_once_a_call_and_just_before_the_last_gradients_arrive(schedule: str, call: Any) -> None:
    def twice(pipeline: pe.Pipeline) -> None:
        call(pipeline)
        pipeline.flush()
        call(pipeline)

    for stage, events in announced(schedule, twice).items():
        assert events == 2 * ["grad", "grad", "last", "grad"], f"stage {stage}"


@pytest.mark.parametrize("schedule", WHOLE)
def test_skipped_items_are_not_waited_for(schedule: str) -> None:
    for events in announced(schedule, lambda pipeline: stream(pipeline, skipped=(0,))).values():
        assert events == ["grad", "last", "grad"]


def test_what_was_dropped_before_it_ran_is_not_waited_for() -> None:
    """GPipe's second backward waits for the first one, until a caller who gave none has left."""

    def leave(pipeline: pe.Pipeline) -> None:
        for item in pipeline.stream(batch(ROWS)):
            if item.index == 1:
                loss_of(item.outputs, item.index).backward()
                break

    for events in announced("gpipe", leave).values():
        assert events == ["last", "grad"]


def test_a_pass_without_gradients_announces_nothing() -> None:
    for events in announced("1f1b", torch.no_grad()(stream_without_backward)).values():
        assert events == []


def stream_without_backward(pipeline: pe.Pipeline) -> None:
    list(pipeline.stream(batch(ROWS)))


def test_an_exception_of_the_callers_function_is_one_of_that_backward() -> None:
    def on_rank(transport: Transport) -> None:
        def refuse(stage: int) -> None:
            raise ArithmeticError(f"stage {stage}")

        graph = pe.StageGraph.chain(2, 2)
        pipeline = pe.Pipeline(
            {transport.rank: Layer(transport.rank)},
            graph=graph,
            schedule="1f1b",
            transport=transport,
            on_last_backward=refuse if transport.rank == 1 else None,
        )
        kind: Any = ArithmeticError if transport.rank == 1 else pe.PeerFailedError
        with pytest.raises(kind, match=r"stage 1") as raised:
            step(pipeline)
        if transport.rank == 0:
            assert "performed 1B2 (backward of stage 1, microbatch 2): ArithmeticError: stage 1" in str(raised.value)
        pipeline.close()

    run_ranks_in_threads(on_rank, 2)


@pytest.mark.parametrize("schedule", SPLIT)
def test_a_schedule_that_splits_backwards_is_refused_at_build(schedule: str) -> None:
    with pytest.raises(pe.UsageError, match=f"on_last_backward: schedule '{schedule}' splits backwards.*after flush"):
        announced(schedule, step)
