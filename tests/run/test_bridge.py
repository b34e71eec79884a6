"""A pipeline behaves like one model whose loss and backward are the caller's: same bits, whatever the caller does."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pipeline_engine as pe
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.testing import run_ranks_in_threads
from tests.run.playing import (
    DEADLINE,
    ROWS,
    WIDTH,
    Case,
    Layer,
    Played,
    batch,
    judge,
    judged,
    loss_of,
    on_pipelines,
    pipeline_on,
    plain,
    play,
)
from tests.run.processes import Crash, run_in_processes
from tests.strategies import Ask, Finish, Give, Skip, histories, one_by_one, schedule_names

some_rows = st.lists(st.sampled_from([0, 1, 2, 3, 5, 200]), max_size=9)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = tuple(draw(some_rows))
    entry = draw(st.sampled_from(["stream", "stream", "stream", "forward", "step"]))
    events = draw(histories(len(rows)))
    if entry == "forward":  # he who called forward has taken all
        events = draw(histories(len(rows)).filter(lambda each: len(rows) == sum(map(is_ask, each))))
    return Case(draw(schedule_names), draw(st.integers(1, 4)), rows, entry, events)


def is_ask(event: object) -> bool:
    return type(event).__name__ == "Ask"


def play_all(cases: list[Case], transport: Transport) -> list[Played]:
    """Several cases one after the other on one pipeline."""
    stage = Layer(transport.rank)
    with pipeline_on(transport, stage, cases[0].schedule) as pipeline:
        return [play(case, pipeline, stage) for case in cases]


# The one law, and the order.


@settings(max_examples=200)
@given(cases())
def test_whatever_the_caller_does_outputs_and_gradients_are_those_of_one_process(case: Case) -> None:
    again = Case(case.schedule, case.num_ranks, (2, 1), "stream", one_by_one(2))
    ranks = run_ranks_in_threads(lambda transport: play_all([case, again], transport), case.num_ranks)
    for index, each in enumerate([case, again]):
        judge(each, [played[index] for played in ranks])


@settings(max_examples=25)
@given(schedule_names, st.integers(1, 4), some_rows)
def test_a_caller_who_gives_at_once_sees_the_program_performed_as_it_is_written(
    name: str, num_ranks: int, rows: list[int]
) -> None:
    case = Case(name, num_ranks, rows, "stream", one_by_one(len(rows)))
    ranks = run_ranks_in_threads(lambda transport: play_all([case], transport)[0], num_ranks)
    judge(case, ranks)
    schedule = pe.build(name, pe.StageGraph.chain(num_ranks, num_ranks), len(rows))
    assert [" ".join(played.log) for played in ranks] == (schedule.to_text().split("\n"))


@settings(max_examples=10)
@given(schedule_names, st.integers(1, 4), some_rows)
def test_the_closed_loop_performs_the_same_program(name: str, num_ranks: int, rows: list[int]) -> None:
    case = Case(name, num_ranks, rows, "step", ())
    ranks = run_ranks_in_threads(lambda transport: play_all([case], transport)[0], num_ranks)
    judge(case, ranks)
    schedule = pe.build(name, pe.StageGraph.chain(num_ranks, num_ranks), len(rows))
    assert [" ".join(played.log) for played in ranks] == (schedule.to_text().split("\n"))


# What the caller may do, case by case.


def test_ignored_items_get_no_gradient() -> None:
    def on_rank(pipeline: pe.Pipeline, stage: Layer) -> None:
        for item in pipeline.stream(batch(ROWS)):
            if item.index % 2:
                loss_of(item.outputs, item.index).backward()
        judged(pipeline, stage, [1, 3], ROWS)

    on_pipelines(on_rank, 3)


def test_a_skipped_item_is_freed_at_once_and_a_late_backward_says_so() -> None:
    def on_rank(pipeline: pe.Pipeline, stage: Layer) -> str:
        for item in pipeline.stream(batch(ROWS)):
            if item.index == 1:
                pipeline.skip(item)
                with pytest.raises(pe.UsageError) as caught:
                    loss_of(item.outputs, item.index).backward()
            else:
                loss_of(item.outputs, item.index).backward()
        judged(pipeline, stage, [0, 2, 3, 4], ROWS)
        return str(caught.value)

    assert set(on_pipelines(on_rank, 3)) == {"backward through microbatch 1, which was skipped."}


def test_skipping_an_item_whose_gradient_was_given_is_refused_in_words_about_skipping() -> None:
    def on_rank(pipeline: pe.Pipeline, stage: Layer) -> str:
        item = next(pipeline.stream(batch([1])))
        loss_of(item.outputs, 0).backward()
        with pytest.raises(pe.UsageError) as caught:
            pipeline.skip(item)
        judged(pipeline, stage, [0], [1])
        return str(caught.value)

    assert set(on_pipelines(on_rank)) == {"microbatch 0 cannot be skipped any more: its gradient was given."}


@pytest.mark.parametrize("entry", ["stream", "forward"])
def test_a_backward_after_a_flush_says_when_the_item_was_dropped(entry: str) -> None:
    def on_rank(pipeline: pe.Pipeline, _: Layer) -> str:
        if entry == "stream":
            output = next(pipeline.stream(batch(ROWS))).outputs
        else:
            output = pipeline.forward(batch(ROWS))[0]
        pipeline.flush()
        with pytest.raises(pe.UsageError) as caught:
            loss_of(output, 0).backward()
        return str(caught.value)

    words = "backward through microbatch 0, which was dropped when the pipeline was flushed."
    assert set(on_pipelines(on_rank)) == {words}


def test_a_backward_after_the_next_call_says_when_the_item_was_dropped() -> None:
    def on_rank(pipeline: pe.Pipeline, stage: Layer) -> str:
        late = next(pipeline.stream(batch([2, 2])))
        for item in pipeline.stream(batch([1])):
            loss_of(item.outputs, item.index).backward()
        with pytest.raises(pe.UsageError) as caught:
            loss_of(late.outputs, 0).backward()
        judged(pipeline, stage, [0], [1])
        return str(caught.value)

    assert set(on_pipelines(on_rank)) == {"backward through microbatch 0, which was dropped when stream was called."}


def test_a_second_backward_without_retain_graph_is_refused_as_in_plain_autograd() -> None:
    def on_rank(pipeline: pe.Pipeline, stage: Layer) -> None:
        for item in pipeline.stream(batch([2, 1])):
            item.outputs.sum().backward()
            with pytest.raises(RuntimeError, match="backward through (the graph a second time|microbatch)"):
                item.outputs.sum().backward()
        pipeline.flush()

    on_pipelines(on_rank)


def test_create_graph_is_refused() -> None:
    def on_rank(pipeline: pe.Pipeline, _: Layer) -> None:
        for item in pipeline.stream(batch([2])):
            with pytest.raises(pe.UsageError, match="create_graph=True: a pipeline keeps no graph of its backward"):
                torch.autograd.backward(loss_of(item.outputs, 0), create_graph=True)

    on_pipelines(on_rank)


def test_a_backward_that_raises_elsewhere_in_the_callers_graph_leaves_nothing_behind() -> None:
    """The engine's callback never runs; what the gates had recorded is forgotten."""

    class Bomb(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError("in the caller's graph")

    def on_rank(pipeline: pe.Pipeline, stage: Layer) -> None:
        weight = torch.ones((), requires_grad=True)
        for item in pipeline.stream(batch(ROWS)):
            loss = loss_of(item.outputs, item.index)
            if item.index == 1:
                with pytest.raises(ZeroDivisionError):
                    (Bomb.apply(weight) + loss).backward()
            else:
                loss.backward()
        judged(pipeline, stage, [0, 2, 3, 4], ROWS)

    on_pipelines(on_rank, 3)


@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("schedule", pe.SCHEDULES)
def test_a_caller_who_breaks_out_of_the_loop_can_use_the_pipeline_again(taken: int, schedule: str) -> None:
    def on_rank(pipeline: pe.Pipeline, stage: Layer) -> None:
        for item in pipeline.stream(batch(ROWS)):
            if item.index == taken:
                break
            loss_of(item.outputs, item.index).backward()
        judged(pipeline, stage, list(range(taken)), ROWS)
        stage.zero_grad(set_to_none=True)
        for item in pipeline.stream(batch(ROWS)):
            loss_of(item.outputs, item.index).backward()
        judged(pipeline, stage, list(range(len(ROWS))), ROWS)

    on_pipelines(on_rank, 3, schedule)


def test_an_exception_in_the_loop_body_reaches_the_caller_unchanged_and_every_other_rank() -> None:
    def on_rank(transport: Transport) -> str:
        try:
            with pipeline_on(transport, Layer(transport.rank)) as pipeline:
                for item in pipeline.stream(batch(ROWS)):
                    if item.index == 2 and transport.rank == 1:
                        raise ZeroDivisionError("the caller's own")
                    loss_of(item.outputs, item.index).backward()
        except ZeroDivisionError as error:
            return f"own: {error}"
        except pe.PeerFailedError as error:
            return str(error)
        return "nothing"

    told = "rank 1 failed while it performed the caller's code: ZeroDivisionError: the caller's own"
    assert run_ranks_in_threads(on_rank, 3) == [told, "own: the caller's own", told]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_stream_without_gradients_between_training_passes_hands_out_the_same_outputs(mode: Any) -> None:
    def on_rank(pipeline: pe.Pipeline, stage: Layer) -> None:
        truth = plain([Layer(0), Layer(1), Layer(2)], batch(ROWS))
        for _ in range(2):
            for item in pipeline.stream(batch(ROWS)):
                loss_of(item.outputs, item.index).backward()
            with mode():
                for item in pipeline.stream(batch(ROWS)):
                    assert not item.outputs.requires_grad
                    assert torch.equal(item.outputs, truth.outputs[item.index])
                (output,) = pipeline.forward(batch([5]))
                assert output.shape == (5, WIDTH) and not output.requires_grad
        stage.zero_grad(set_to_none=True)
        for item in pipeline.stream(batch(ROWS)):
            loss_of(item.outputs, item.index).backward()
        judged(pipeline, stage, list(range(len(ROWS))), ROWS)

    on_pipelines(on_rank, 3)


@pytest.mark.parametrize("entry", ["stream", "forward"])
def test_outputs_may_be_changed_in_place_on_every_rank(entry: str) -> None:
    def on_rank(pipeline: pe.Pipeline, stage: Layer) -> None:
        def caller(output: torch.Tensor, number: int) -> torch.Tensor:
            assert not output._is_view() and output.is_contiguous()
            output.div_(0.5)
            return loss_of(output / 2, number)

        if entry == "stream":
            for item in pipeline.stream(batch(ROWS)):
                caller(item.outputs, item.index).backward()
            order = list(range(len(ROWS)))
        else:
            outputs = pipeline.forward(batch(ROWS))
            sum(caller(output, number) for number, output in enumerate(outputs)).backward()  # type: ignore[union-attr]
            order = list(range(len(ROWS)))
        judged(pipeline, stage, order, ROWS)

    on_pipelines(on_rank, 3)


def test_zero_microbatches_are_legal_everywhere() -> None:
    def on_rank(pipeline: pe.Pipeline, stage: Layer) -> None:
        assert list(pipeline.stream([])) == [] == pipeline.forward([]) == pipeline.step([], loss_of)
        judged(pipeline, stage, [], [])

    on_pipelines(on_rank, 3)


def test_their_number_may_differ_from_call_to_call() -> None:
    def on_rank(pipeline: pe.Pipeline, stage: Layer) -> None:
        for count in (1, 5, 2, 0, 3):
            stage.zero_grad(set_to_none=True)
            for item in pipeline.stream(batch([2] * count)):
                loss_of(item.outputs, item.index).backward()
            judged(pipeline, stage, list(range(count)), [2] * count)

    on_pipelines(on_rank, 3)


def test_inputs_are_read_as_late_as_the_schedule_allows() -> None:
    def on_rank(pipeline: pe.Pipeline, _: Layer) -> list[int]:
        read: list[int] = []

        def lazily() -> Iterator[pe.Microbatch]:
            for number, microbatch in enumerate(batch([1] * 6)):
                read.append(number)
                yield microbatch

        lengths = []
        for item in pipeline.stream(lazily(), num_microbatches=6):
            lengths.append(len(read))
            loss_of(item.outputs, item.index).backward()
        return lengths

    assert on_pipelines(on_rank, 3) == [[3, 4, 5, 6, 6, 6], [2, 3, 4, 5, 6, 6], [1, 2, 3, 4, 5, 6]]


def test_two_calls_of_forward_may_be_open_at_once_under_one_backward() -> None:
    def on_rank(pipeline: pe.Pipeline, stage: Layer) -> None:
        first, second = pipeline.forward(batch(ROWS)), pipeline.forward(batch([2, 5]))
        losses = [loss_of(output, number) for outputs in (first, second) for number, output in enumerate(outputs)]
        sum(losses[1:], start=losses[0]).backward()  # type: ignore[no-untyped-call]
        pipeline.flush()
        layers = [Layer(rank) for rank in range(3)]
        summed = [plain(layers, batch(rows)).summed(stage.number, range(len(rows))) for rows in (ROWS, [2, 5])]
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, summed[0][name] + summed[1][name])

    on_pipelines(on_rank, 3)


@pytest.mark.parametrize("schedule", pe.SCHEDULES)
def test_a_stream_may_run_between_a_forward_and_its_backward(schedule: str) -> None:
    def on_rank(pipeline: pe.Pipeline, stage: Layer) -> None:
        outputs = pipeline.forward(batch(ROWS))
        loss_of(outputs[3], 3).backward()
        for item in pipeline.stream(batch([200, 1])):
            loss_of(item.outputs, item.index).backward()
        loss_of(outputs[1], 1).backward()
        pipeline.flush()
        layers = [Layer(rank) for rank in range(3)]
        early, between = plain(layers, batch(ROWS)), plain(layers, batch([200, 1]))
        expected = early.summed(stage.number, [3, 1]), between.summed(stage.number, [0, 1])
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[0][name] + expected[1][name])

    on_pipelines(on_rank, 3, schedule)


def test_two_pipelines_live_side_by_side() -> None:
    def on_rank(transports: list[Transport], rank: int) -> None:
        first, second = Layer(rank), Layer(rank)
        with pipeline_on(transports[0], first) as one, pipeline_on(transports[1], second, "gpipe") as other:
            pairs = zip(one.stream(batch(ROWS)), other.stream(batch(ROWS)), strict=True)
            for left, right in pairs:
                (loss_of(left.outputs, left.index) + loss_of(right.outputs, right.index)).backward()
            judged(one, first, list(range(len(ROWS))), ROWS)
            judged(other, second, list(range(len(ROWS))), ROWS)

    seconds = pe.MemoryTransport.connect(3)
    run_ranks_in_threads(lambda transport: on_rank([transport, seconds[transport.rank]], transport.rank), 3)


# Memory.


class Token:
    """Something that lives exactly as long as the graph it hangs on."""


class Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: Token) -> torch.Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Watched(nn.Module):
    """A stage that counts how many of its graphs are alive whenever one is added."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer = Layer(number)
        self.alive: weakref.WeakSet[Token] = weakref.WeakSet()
        self.peak = 0

    def forward(self, x: torch.Tensor, *, number: int) -> torch.Tensor:
        token = Token()
        self.alive.add(token)
        self.peak = max(self.peak, len(self.alive))
        return Held.apply(self.layer(x, number=number), token)  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", pe.SCHEDULES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_graphs_alive_at_once_are_as_many_as_the_simulator_says(schedule: str, num_ranks: int) -> None:
    def on_rank(pipeline: pe.Pipeline, stage: Any) -> int:
        for item in pipeline.stream(batch([2] * 9)):
            loss_of(item.outputs, item.index).backward()
        return int(stage.peak)

    built = pe.build(schedule, pe.StageGraph.chain(num_ranks, num_ranks), 9)
    gc.collect()
    peaks = on_pipelines(on_rank, num_ranks, schedule, Watched)
    assert tuple(peaks) == pe.simulate(built, pe.Costs()).peak_in_flight


@pytest.mark.parametrize("give", [True, False])
def test_after_a_flush_no_graph_of_a_stage_is_alive_though_the_outputs_are(give: bool) -> None:
    def on_rank(pipeline: pe.Pipeline, stage: Any) -> int:
        kept = []
        for item in pipeline.stream(batch(ROWS)):
            kept.append(item)
            if give:
                loss_of(item.outputs, item.index).backward(retain_graph=False)
        kept += pipeline.forward(batch(ROWS))
        pipeline.flush()
        gc.collect()
        assert len(kept) == 2 * len(ROWS)
        return len(stage.alive)

    assert on_pipelines(on_rank, 3, "1f1b", Watched) == [0, 0, 0]


def test_a_skipped_item_leaves_no_graph_behind() -> None:
    def on_rank(pipeline: pe.Pipeline, stage: Any) -> list[int]:
        alive = []
        for item in pipeline.stream(batch(ROWS)):
            pipeline.skip(item)
            gc.collect()
            alive.append(len(stage.alive))
        return alive

    for rank, alive in enumerate(on_pipelines(on_rank, 3, "1f1b", Watched)):
        assert max(alive) <= 2 - rank, f"rank {rank}: {alive}"


# Wrong arguments: at build, before anything moves.


def refused_on_every_rank(error: type[Exception], words: str, num_ranks: int, function: Any) -> None:
    def on_rank(transport: Transport) -> None:
        with pytest.raises(error, match=words):
            function(transport)

    run_ranks_in_threads(on_rank, num_ranks, timeout=10)


def test_an_unknown_schedule_is_refused_at_build() -> None:
    words = r"schedule 'magic' is unknown; one of 'gpipe', '1f1b'"
    refused_on_every_rank(pe.ScheduleError, words, 2, lambda transport: pipeline_on(transport, Layer(0), "magic"))


def test_stages_that_do_not_cover_the_graph_are_refused_at_build() -> None:
    graph = pe.StageGraph.chain(2, 2)

    def build(transport: Transport) -> None:
        pe.Pipeline({0: Layer(0)}, graph=graph, schedule="1f1b", transport=transport)

    transport = pe.MemoryTransport.connect(2)[1]
    with pytest.raises(pe.UsageError, match=r"rank 1 owns stages \[1\] of the graph, but was given \[0\]"):
        build(transport)


def test_a_transport_of_another_size_is_refused_at_build() -> None:
    graph = pe.StageGraph.chain(2, 2)
    words = "the graph is for 2 ranks, the transport joins 3; the numbers must be equal"
    refused_on_every_rank(
        pe.UsageError,
        words,
        3,
        lambda transport: pe.Pipeline({0: Layer(0)}, graph=graph, schedule="1f1b", transport=transport),
    )


def test_an_unlawful_schedule_of_the_callers_own_is_refused_at_build() -> None:
    graph = pe.StageGraph.chain(2, 2)
    crossed = pe.Schedule.from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", graph, "crossed")
    words = "schedule 'crossed' deadlocks:\nrank 0 step 1   0B0   waits for"
    refused_on_every_rank(pe.ScheduleError, words, 2, lambda transport: pipeline_on(transport, Layer(0), crossed))


def test_a_lawful_schedule_of_the_callers_own_is_run_as_it_is() -> None:
    graph = pe.StageGraph.chain(2, 2)
    text = "0F0 0F1 0F2 0B2 0B0 0B1\n1F0 1F1 1F2 1B2 1B0 1B1"
    backwards = pe.Schedule.from_text(text, graph, "last first")

    def on_rank(pipeline: pe.Pipeline, stage: Layer) -> str:
        outputs = pipeline.forward(batch([2, 1, 3]))
        sum(loss_of(output, number) for number, output in enumerate(outputs)).backward()  # type: ignore[union-attr]
        judged(pipeline, stage, [2, 0, 1], [2, 1, 3])
        return " ".join(stage.log)

    assert on_pipelines(on_rank, 2, backwards) == text.split("\n")


def test_a_schedule_for_another_number_of_microbatches_is_refused() -> None:
    schedule = pe.build("1f1b", pe.StageGraph.chain(2, 2), 3)

    def on_rank(pipeline: pe.Pipeline, _: Layer) -> None:
        with pytest.raises(pe.UsageError, match="schedule '1f1b' is for 3 microbatches, not for 2"):
            pipeline.stream(batch([1, 1]))

    on_pipelines(on_rank, 2, schedule)


def test_something_that_is_no_microbatch_is_refused_with_the_cure() -> None:
    def on_rank(pipeline: pe.Pipeline, stage: Layer) -> None:
        with pytest.raises((pe.UsageError, pe.PeerFailedError), match=r"wrap the arguments of the first stage"):
            next(pipeline.stream([torch.zeros(1, WIDTH)]))  # type: ignore[list-item]
        for item in pipeline.stream(batch([1])):
            loss_of(item.outputs, 0).backward()
        judged(pipeline, stage, [0], [1])

    on_pipelines(on_rank)


def test_an_iterable_without_a_length_needs_its_number() -> None:
    def on_rank(pipeline: pe.Pipeline, _: Layer) -> None:
        with pytest.raises(pe.UsageError, match="number of microbatches is unknown"):
            pipeline.stream(iter(batch([1])))
        with pytest.raises(pe.UsageError, match="num_microbatches is 2, but 1 microbatches were passed"):
            pipeline.stream(batch([1]), num_microbatches=2)

    on_pipelines(on_rank)


def test_a_closed_pipeline_says_that_it_is() -> None:
    def on_rank(transport: Transport) -> None:
        pipeline = pipeline_on(transport, Layer(transport.rank))
        pipeline.close()
        pipeline.close()
        for use in (pipeline.flush, lambda: pipeline.stream([]), lambda: pipeline.forward([])):
            with pytest.raises(pe.UsageError, match="the pipeline is closed; build another one"):
                use()

    run_ranks_in_threads(on_rank, 2)


def test_the_deadline_is_in_seconds_and_names_who_was_waited_for() -> None:
    too_late = threading.Event()

    def on_rank(transport: Transport) -> None:
        pipeline = pipeline_on(transport, Layer(transport.rank), deadline=0.2)
        if transport.rank == 0:
            with pytest.raises(pe.DeadlineError, match="within 0.2 seconds; waiting for rank 1"):
                pipeline.flush()
            too_late.set()
        assert too_late.wait(DEADLINE)
        pipeline.close()

    run_ranks_in_threads(on_rank, 2)


# Agreement of the ranks.


@pytest.mark.parametrize(
    ("words", "calls"),
    [
        (
            "number of microbatches: rank 0 has 2, rank 1 has 3",
            [lambda p: p.stream(batch([1] * 2)), lambda p: p.stream(batch([1] * 3))],
        ),
        (
            "entry point: rank 0 has 'stream', rank 1 has 'forward'",
            [lambda p: p.stream(batch([1])), lambda p: p.forward(batch([1]))],
        ),
        ("entry point: rank 0 has 'flush', rank 1 has 'stream'", [lambda p: p.flush(), lambda p: p.stream(batch([1]))]),
        (
            "grad mode: rank 0 has True, rank 1 has False",
            [lambda p: p.stream(batch([1])), torch.no_grad()(lambda p: p.stream(batch([1])))],
        ),
    ],
)
def test_ranks_that_disagree_all_find_out_and_can_go_on(words: str, calls: list[Any]) -> None:
    def on_rank(pipeline: pe.Pipeline, stage: Layer) -> None:
        with pytest.raises(pe.UsageError, match=f"ranks disagree on the {words}; every rank"):
            calls[stage.number](pipeline)
        for item in pipeline.stream(batch(ROWS)):
            loss_of(item.outputs, item.index).backward()
        judged(pipeline, stage, list(range(len(ROWS))), ROWS)

    on_pipelines(on_rank)


def test_ranks_whose_callers_did_different_things_find_out_at_the_flush() -> None:
    def on_rank(pipeline: pe.Pipeline, stage: Layer) -> None:
        for item in pipeline.stream(batch([1, 1])):
            if not (stage.number == 0 and item.index == 1):
                loss_of(item.outputs, item.index).backward()
        with pytest.raises(pe.UsageError, match="ranks disagree on the history of call 0"):
            pipeline.flush()

    on_pipelines(on_rank, 2, "gpipe")


# Failures.


class Fragile(Layer):
    """Stage 1 breaks on microbatch 2, in its forward or its backward."""

    where = "nowhere"

    def forward(self, x: torch.Tensor, *, number: int = 0) -> torch.Tensor:
        y = super().forward(x, number=number)
        if (self.number, number) == (1, 2):
            if self.where == "forward":
                raise ZeroDivisionError("boom")
            if self.where == "backward":
                y.register_hook(self._break)
        return y

    def _break(self, grad: torch.Tensor) -> None:
        raise ZeroDivisionError("boom")


def survive(pipeline: pe.Pipeline, stage: Fragile, where: str, entry: str) -> tuple[str, float, list[str]]:
    """Run into the failure, then train as if nothing had been; what was raised, after how many seconds, with notes."""
    stage.where = where
    raised: BaseException | None = None
    began = monotonic()
    try:
        if entry == "step":
            pipeline.step(batch(ROWS), loss_of)
        else:
            for item in pipeline.stream(batch(ROWS)):
                loss_of(item.outputs, item.index).backward()
        pipeline.flush()
    except (ZeroDivisionError, pe.PeerFailedError) as error:
        raised = error
    seconds = monotonic() - began
    stage.where = "nowhere"
    case = Case("1f1b", 3, ROWS, "stream", one_by_one(len(ROWS)))
    played = play(case, pipeline, stage)
    judge_one(case, stage.number, played)
    told = f"{type(raised).__name__}: {raised}"
    return told, seconds, list(getattr(raised, "__notes__", []))


def judge_one(case: Case, rank: int, played: Played) -> None:
    truth = plain([Layer(each) for each in range(case.num_ranks)], batch(case.rows))
    for name, grad in truth.summed(rank, played.order).items():
        assert torch.equal(played.gradients[name], grad), name


def judge_failure(where: str, ranks: list[tuple[str, float, list[str]]]) -> None:
    action = (
        "1F2 (forward of stage 1, microbatch 2)" if where == "forward" else "1B2 (backward of stage 1, microbatch 2)"
    )
    peers = f"PeerFailedError: rank 1 failed while it performed {action}: ZeroDivisionError: boom"
    assert [told for told, _, _ in ranks] == [peers, "ZeroDivisionError: boom", peers]
    slowest = max(seconds for _, seconds, _ in ranks)
    print(f"every rank knew within {1000 * slowest:.0f} ms of the beginning of the call")
    assert slowest < 10
    assert any(f"while rank 1 performed {action}" in note for note in ranks[1][2])
    assert any("traceback of rank 1" in note and "boom" in note for note in ranks[0][2])


@pytest.mark.parametrize("entry", ["stream", "step"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_stage_that_raises_stops_every_rank_and_the_pipeline_works_again(where: str, entry: str) -> None:
    ranks = on_pipelines(lambda pipeline, stage: survive(pipeline, stage, where, entry), 3, "1f1b", Fragile)  # type: ignore[arg-type]
    judge_failure(where, ranks)


# In real processes.


def trained_in_process(rank: int, cases: list[Case]) -> list[Played]:
    with_one_pipeline = play_all(cases, pe.TorchTransport())
    return with_one_pipeline


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_same_holds_between_processes(num_ranks: int) -> None:
    ask_all = (Ask(0), Ask(1), Ask(2), Ask(3), Ask(4))
    histories = {
        "stream": [
            one_by_one(5),
            (*ask_all, Give((4, 0, 2)), Finish(), Give((1, 3))),
            (Ask(0), Ask(1), Give((1,)), Skip(0), Ask(2)),
        ],
        "forward": [(*ask_all, Give((0, 1, 2, 3, 4))), (*ask_all, Give((3,)), Give((1,)))],
        "step": [()],
    }
    rows = (3, 200, 1, 0, 5)
    for name in pe.SCHEDULES:
        cases = [Case(name, num_ranks, rows, entry, each) for entry, all_of in histories.items() for each in all_of]
        ranks = run_in_processes(trained_in_process, num_ranks, cases)
        for rank in ranks:
            assert not isinstance(rank, Crash), rank
        for index, case in enumerate(cases):
            judge(case, [rank[index] for rank in ranks])


def survived_in_process(rank: int) -> list[tuple[str, float, list[str]]]:
    stage = Fragile(rank)
    with pipeline_on(pe.TorchTransport(), stage) as pipeline:
        return [survive(pipeline, stage, where, entry) for where in FAILURES for entry in ("stream", "step")]


FAILURES = ("forward", "backward")


def test_a_stage_that_raises_in_one_process_stops_every_process_and_the_pipeline_works_again() -> None:
    ranks = run_in_processes(survived_in_process, 3)
    for rank in ranks:
        assert not isinstance(rank, Crash), rank
    for index in range(4):
        judge_failure(FAILURES[index // 2], [rank[index] for rank in ranks])


def test_two_pipelines_share_one_group_of_processes() -> None:
    for rank in run_in_processes(two_pipelines_in_process, 2):
        assert not isinstance(rank, Crash), rank


def two_pipelines_in_process(rank: int) -> None:
    first, second = Layer(rank), Layer(rank)
    with pipeline_on(pe.TorchTransport(), first) as one, pipeline_on(pe.TorchTransport(), second, "gpipe") as other:
        for left, right in zip(one.stream(batch(ROWS)), other.stream(batch(ROWS)), strict=True):
            (loss_of(left.outputs, left.index) + loss_of(right.outputs, right.index)).backward()
        judged(one, first, list(range(len(ROWS))), ROWS)
        judged(other, second, list(range(len(ROWS))), ROWS)
