"""With ``keep_open`` outputs outlast calls and flushes, until their gradient is given or all ranks let go of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.testing import run_ranks_in_threads
from tests.oracles.plain import gradients_of
from tests.run.playing import ROWS, Case, Layer, Played, Rank, batch, judge, loss_of, on_ranks, plain, total
from tests.strategies import Ask, Give, Skip, histories, schedule_names

SCHEDULES = ("1f1b", "interleaved", "zb-v")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("entry", ["stream", "forward"])
def test_a_gradient_may_come_after_a_flush_and_another_call(schedule: str, entry: str) -> None:
    def on_rank(rank: Rank) -> None:
        outputs = taken(rank, entry, 4)
        loss_of(outputs[2], 2).backward()
        rank.check_gradients([2], ROWS)
        total(loss_of(outputs[k], k) for k in (0, 3)).backward()
        for item in rank.pipeline.stream(batch([2, 5])):
            assert torch.equal(item.outputs, plain(rank.graph.num_stages, [2, 5]).outputs[item.index])
        loss_of(outputs[1], 1).backward()
        rank.check_gradients([2, 0, 3, 1], ROWS)

    on_ranks(on_rank, 3, schedule, keep_open=True)


def taken(rank: Rank, entry: str, count: int) -> list[torch.Tensor]:
    """The first outputs of a batch; a stream is left then."""
    if entry == "forward":
        return rank.pipeline.forward(batch(ROWS))[:count]
    items = rank.pipeline.stream(batch(ROWS))
    outputs = [next(items).outputs for _ in range(count)]
    items.close()  # type: ignore[attr-defined]
    return outputs


@st.composite
def interrupted(draw: st.DrawFn) -> tuple[Case, frozenset[int]]:
    """A caller, and the places in his history at which he calls something else."""
    rows = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    events = draw(histories(len(rows)).filter(len))
    places = draw(st.frozensets(st.integers(1, len(events))))  # a stream that nobody has looked at would end
    return Case(draw(schedule_names), draw(st.integers(1, 3)), rows, "stream", events), places


@settings(max_examples=60)
@given(interrupted())
def test_whatever_is_called_in_between_gradients_are_those_of_one_process(case: tuple[Case, frozenset[int]]) -> None:
    judge(case[0], run_ranks_in_threads(lambda transport: play_interrupted(*case, transport), case[0].num_ranks))


def play_interrupted(case: Case, places: frozenset[int], transport: Transport) -> Played:
    """A stream; at the places a forward without gradients, or a flush once nothing more is asked for."""
    rank = Rank(transport, case.schedule, keep_open=True)
    held: dict[int, Any] = {}
    seen: dict[int, torch.Tensor] = {}
    asks = [place for place, event in enumerate(case.events) if isinstance(event, Ask)]
    with rank.pipeline as pipeline:
        items = pipeline.stream(batch(case.rows))
        for place, event in enumerate(case.events):
            if place in places and place > max(asks, default=-1):
                pipeline.flush()
            elif place in places:
                with torch.no_grad():
                    pipeline.forward(batch([1, 2]))
            match event:
                case Ask(number):
                    held[number] = next(items)
                    seen[number] = held[number].outputs.detach().clone()
                case Give(numbers):
                    total(loss_of(held[number].outputs, number) for number in numbers).backward()
                case Skip(number):
                    pipeline.skip(held[number])
        pipeline.flush()
        gradients = {number: gradients_of(stage) for number, stage in rank.stages.items()}
        return Played(seen, gradients, list(rank.log))


class Saved:
    """What a graph keeps in the place of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # of an output, which would hold its own graph


class Remembering(Layer):
    """A layer that knows which of its graphs are alive, by number of the microbatch."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.graphs: dict[int, weakref.WeakSet[Saved]] = {}

    def forward(self, x: torch.Tensor, *, number: int = 0) -> torch.Tensor:
        self.graphs[number] = weakref.WeakSet()

        def save(tensor: torch.Tensor) -> Saved:
            saved = Saved(tensor)
            self.graphs[number].add(saved)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(save, lambda saved: saved.tensor):
            return super().forward(x, number=number)

    @property
    def alive(self) -> set[int]:
        return {number for number, graph in self.graphs.items() if graph}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_all_ranks_have_let_go_of_is_freed_at_the_next_call(schedule: str) -> None:
    def on_rank(rank: Rank) -> list[set[int]]:
        outputs: list[Any] = taken(rank, "stream", 4)
        loss_of(outputs[0], 0).backward()
        outputs[1] = None
        outputs[2 if rank.number == 1 else 3] = None  # one rank alone frees nothing
        rank.pipeline.flush()
        found = [stage.alive for stage in rank.stages.values()]
        outputs.clear()
        rank.pipeline.forward([])
        assert not any(stage.alive for stage in rank.stages.values())
        rank.check_gradients([0], ROWS)
        return found

    for found in on_ranks(on_rank, 2, schedule, Remembering, keep_open=True):
        assert all(alive == {2, 3} for alive in found)


def test_a_graph_that_was_retained_outlasts_a_flush_too() -> None:
    def on_rank(rank: Rank) -> None:
        (output,) = rank.pipeline.forward(batch([3]))
        loss = loss_of(output, 0)
        loss.backward(retain_graph=True)
        rank.check_gradients([0], [3])
        rank.zero_grad()
        loss.backward()
        rank.check_gradients([0], [3])
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()

    on_ranks(on_rank, 3, "zb-h1", keep_open=True)


def test_a_stream_that_was_flushed_hands_out_nothing_more() -> None:
    def on_rank(rank: Rank) -> None:
        items = rank.pipeline.stream(batch(ROWS))
        item = next(items)
        rank.pipeline.flush()
        with pytest.raises(pe.UsageError, match="this stream cannot go on: it ended when the pipeline was flushed"):
            next(items)
        loss_of(item.outputs, 0).backward()
        rank.check_gradients([0], ROWS)

    on_ranks(on_rank, keep_open=True)


def begin_stream(rank: Rank) -> tuple[Any, Callable[[], object]]:
    items = rank.pipeline.stream(batch(ROWS))
    return next(items).outputs, lambda: next(items)


def begin_waves(rank: Rank) -> tuple[Any, Callable[[], object]]:
    waves = rank.pipeline.waves()
    for row in ROWS:
        waves.add(batch([row]))
    return waves.take()[0], waves.take


@pytest.mark.parametrize("begin", [begin_stream, begin_waves])
def test_a_loop_that_was_flushed_in_the_middle_stands_in_the_way_of_no_call(
    begin: Callable[[Rank], tuple[Any, Callable[[], object]]],
) -> None:
    def on_rank(rank: Rank) -> None:
        output, go_on = begin(rank)
        rank.pipeline.flush()
        rank.train(ROWS)
        with pytest.raises(pe.UsageError, match="cannot go on: it ended when the pipeline was flushed"):
            go_on()
        rank.train(ROWS)
        loss_of(output, 0).backward()
        rank.pipeline.flush()
        assert not rank.pipeline._accord.calls

    on_ranks(on_rank, keep_open=True)


def test_what_was_skipped_or_closed_is_dropped_all_the_same() -> None:
    def on_rank(rank: Rank) -> list[str]:
        items = rank.pipeline.stream(batch(ROWS))
        first, second = next(items), next(items)
        rank.pipeline.skip(first)
        rank.pipeline.flush()
        rank.pipeline.close()
        told = []
        for item in (first, second):
            with pytest.raises(pe.UsageError) as caught:
                loss_of(item.outputs, item.index).backward()
            told.append(str(caught.value))
        return told

    for first, second in on_ranks(on_rank, keep_open=True):
        assert first == "backward through microbatch 0, which was dropped when the pipeline was closed."
        assert second == "backward through microbatch 1, which was dropped when the pipeline was closed."


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_invalidate_finishes_what_was_given_of_every_call(schedule: str) -> None:
    """Of a call of forward too, where ranks may stand before a backward whose gradient was not given."""

    def on_rank(rank: Rank) -> None:
        outputs = rank.pipeline.forward(batch(ROWS))
        loss_of(outputs[4], 4).backward()
        rank.pipeline.invalidate()
        before = [gradients_of(stage) for stage in rank.stages.values()]
        assert all(gradients.keys() == {"weight", "bias"} for gradients in before)
        rank.check_gradients([4], ROWS)

    on_ranks(on_rank, 3, schedule)


def test_ranks_that_keep_and_do_not_keep_find_out() -> None:
    words = "ranks disagree on the keep_open: rank 0 has False, rank 1 has True"

    def on_rank(transport: Transport) -> None:
        pipeline = Rank(transport, keep_open=transport.rank == 1).pipeline
        with pytest.raises(pe.UsageError, match=words):
            pipeline.forward(batch([1]))
        pipeline.close()

    run_ranks_in_threads(on_rank, 2)
