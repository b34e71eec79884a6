"""A call from its first item to its last gradient: what is ignored, skipped, late, left early, or left open."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Barrier

import pytest
import torch

import pipeline_engine as pe
from tests.run.playing import ROWS, WIDTH, Layer, Rank, batch, loss_of, on_ranks, plain, total


@pytest.mark.parametrize("schedule", pe.SCHEDULES)
def test_ignored_items_get_no_gradient(schedule: str) -> None:
    def on_rank(rank: Rank) -> None:
        for item in rank.pipeline.stream(batch(ROWS)):
            if item.index % 2:
                loss_of(item.outputs, item.index).backward()
        rank.check_gradients([1, 3], ROWS)

    on_ranks(on_rank, 3, schedule)


def test_a_late_backward_on_a_skipped_item_says_so() -> None:
    def on_rank(rank: Rank) -> str:
        for item in rank.pipeline.stream(batch(ROWS)):
            if item.index == 1:
                rank.pipeline.skip(item)
                rank.pipeline.skip(item)  # saying it twice is no mistake
                with pytest.raises(pe.UsageError) as caught:
                    loss_of(item.outputs, item.index).backward()
            else:
                loss_of(item.outputs, item.index).backward()
        rank.check_gradients([0, 2, 3, 4], ROWS)
        return str(caught.value)

    assert set(on_ranks(on_rank, 3)) == {"backward through microbatch 1, which was skipped."}


def test_skipping_an_item_whose_gradient_was_given_is_refused() -> None:
    def on_rank(rank: Rank) -> str:
        item = next(rank.pipeline.stream(batch([1])))
        loss_of(item.outputs, 0).backward()
        with pytest.raises(pe.UsageError) as caught:
            rank.pipeline.skip(item)
        rank.check_gradients([0], [1])
        return str(caught.value)

    assert set(on_ranks(on_rank)) == {"microbatch 0 cannot be skipped any more: its gradient was given."}


def test_skipping_where_nothing_is_differentiated_changes_nothing() -> None:
    @torch.no_grad()
    def on_rank(rank: Rank) -> list[int]:
        seen = []
        for item in rank.pipeline.stream(batch(ROWS)):
            rank.pipeline.skip(item)
            seen.append(item.index)
        return seen

    assert on_ranks(on_rank, 3) == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize("entry", ["stream", "forward"])
def test_a_backward_after_a_flush_says_when_the_item_was_dropped(entry: str) -> None:
    def on_rank(rank: Rank) -> str:
        if entry == "stream":
            output = next(rank.pipeline.stream(batch(ROWS))).outputs
        else:
            output = rank.pipeline.forward(batch(ROWS))[0]
        rank.pipeline.flush()
        with pytest.raises(pe.UsageError) as caught:
            loss_of(output, 0).backward()
        return str(caught.value)

    words = "backward through microbatch 0, which was dropped when the pipeline was flushed."
    assert set(on_ranks(on_rank)) == {words}


def test_a_backward_after_the_next_flush_does_not_spoil_what_comes_then() -> None:
    def on_rank(rank: Rank) -> None:
        late = rank.pipeline.forward(batch([2, 2]))
        rank.pipeline.flush()
        for item in rank.pipeline.stream(batch(ROWS)):
            if item.index == 2:
                with pytest.raises(pe.UsageError, match="dropped when the pipeline was flushed"):
                    (loss_of(late[0], 0) + loss_of(item.outputs, 2)).backward()
            else:
                loss_of(item.outputs, item.index).backward()
        rank.check_gradients([0, 1, 3, 4], ROWS)

    on_ranks(on_rank)


@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("schedule", pe.SCHEDULES)
def test_a_caller_who_breaks_out_of_the_loop_can_use_the_pipeline_again(taken: int, schedule: str) -> None:
    def on_rank(rank: Rank) -> None:
        for item in rank.pipeline.stream(batch(ROWS)):
            if item.index == taken:
                break
            loss_of(item.outputs, item.index).backward()
        rank.check_gradients(range(taken), ROWS)
        rank.zero_grad()
        rank.train(ROWS)
        rank.check_gradients(range(len(ROWS)), ROWS)

    on_ranks(on_rank, 3, schedule)


def test_a_stream_that_nobody_looks_at_leaves_nothing_behind() -> None:
    def on_rank(rank: Rank) -> None:
        rank.pipeline.stream(batch(ROWS))
        rank.train(ROWS)
        rank.check_gradients(range(len(ROWS)), ROWS)
        assert len(rank.log) == 2 * len(ROWS)

    on_ranks(on_rank, 3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("schedule", pe.SCHEDULES)
def test_a_stream_without_gradients_between_training_passes_hands_out_the_same(schedule: str, mode: type) -> None:
    def on_rank(rank: Rank) -> None:
        truth = plain(rank.graph.num_stages, ROWS)
        rank.train(ROWS)
        with mode():
            for item in rank.pipeline.stream(batch(ROWS)):
                assert not item.outputs.requires_grad
                assert torch.equal(item.outputs, truth.outputs[item.index])
            (output,) = rank.pipeline.forward(batch([5]))
            assert output.shape == (5, WIDTH) and not output.requires_grad
        rank.pipeline.flush()
        rank.zero_grad()
        rank.train(ROWS)
        rank.check_gradients(range(len(ROWS)), ROWS)

    on_ranks(on_rank, 2, schedule)


def test_two_calls_of_forward_may_be_open_at_once_under_one_backward() -> None:
    def on_rank(rank: Rank) -> None:
        first, second = rank.pipeline.forward(batch(ROWS)), rank.pipeline.forward(batch([2, 5]))
        total(loss_of(output, k) for outputs in (first, second) for k, output in enumerate(outputs)).backward()
        check_sum(rank, {tuple(ROWS): range(5), (2, 5): range(2)})

    on_ranks(on_rank, 3)


def check_sum(rank: Rank, orders: dict[tuple[int, ...], object]) -> None:
    """The gradients are the sum over several batches."""
    rank.pipeline.flush()
    for number, stage in rank.stages.items():
        parts = [plain(rank.graph.num_stages, rows).summed(number, order) for rows, order in orders.items()]  # type: ignore[arg-type]
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, sum(part[name] for part in parts), rtol=1e-5, atol=1e-4)


def test_a_call_that_does_what_another_did_before_it_may_do_something_else_then() -> None:
    """The forward asks first for what the stream asks for next: known by then, unlike what the stream does after it."""

    def on_rank(rank: Rank) -> None:
        items = rank.pipeline.stream(batch(ROWS))
        item = next(items)
        rank.pipeline.forward(batch(ROWS))
        for following in items:
            loss_of(item.outputs, item.index).backward()
            item = following
        loss_of(item.outputs, item.index).backward()
        rank.check_gradients(range(5), ROWS)

    on_ranks(on_rank)


@pytest.mark.parametrize("schedule", pe.SCHEDULES)
def test_a_stream_may_run_between_a_forward_and_its_backward(schedule: str) -> None:
    """With messages of two parts, whose second parts must not be taken for each other's."""

    def on_rank(rank: Rank) -> None:
        outputs = rank.pipeline.forward(batch([200] * 5))
        loss_of(outputs[3], 3).backward()
        rank.train([200, 1])
        loss_of(outputs[1], 1).backward()
        check_sum(rank, {(200,) * 5: [3, 1], (200, 1): [0, 1]})

    on_ranks(on_rank, 3, schedule)


def test_a_stream_inside_a_running_one_is_refused_until_that_one_is_closed() -> None:
    def on_rank(rank: Rank) -> None:
        items = rank.pipeline.stream(batch(ROWS))
        next(items)
        with pytest.raises(pe.UsageError, match="a stream of this pipeline is still running"):
            rank.pipeline.stream(batch(ROWS))
        items.close()  # type: ignore[attr-defined]
        rank.train(ROWS)
        rank.check_gradients(range(len(ROWS)), ROWS)

    on_ranks(on_rank, 3)


def test_a_stream_that_was_ended_by_another_call_says_so() -> None:
    def on_rank(rank: Rank) -> None:
        items = rank.pipeline.stream(batch(ROWS))
        rank.pipeline.flush()
        with pytest.raises(pe.UsageError, match="this stream cannot go on: it ended when the pipeline was flushed"):
            next(items)
        rank.train(ROWS)
        rank.check_gradients(range(len(ROWS)), ROWS)

    on_ranks(on_rank)


@pytest.mark.parametrize("schedule", pe.SCHEDULES)
def test_a_forward_in_the_middle_of_a_stream_takes_none_of_its_messages(schedule: str) -> None:
    """A reference model, say, asked inside a training loop; its messages have the sizes and numbers of the others'."""
    rows = [200] * 6

    def on_rank(rank: Rank) -> None:
        truth = plain(rank.graph.num_stages, rows[:4])
        for item in rank.pipeline.stream(batch(rows)):
            if item.index % 2:
                with torch.no_grad():
                    outputs = rank.pipeline.forward(batch(rows[:4]))
                assert all(map(torch.equal, outputs, truth.outputs))
            loss_of(item.outputs, item.index).backward()
        rank.check_gradients(range(6), rows)

    on_ranks(on_rank, 3, schedule)


@pytest.mark.parametrize("schedule", pe.SCHEDULES)
@pytest.mark.parametrize("every", [1, 2])
def test_an_optimizer_step_in_the_loop_gives_what_it_gives_in_one_process(schedule: str, every: int) -> None:
    rows = [3, 1, 4, 2, 5, 2]

    def on_rank(rank: Rank) -> None:
        for item in rank.pipeline.stream(batch(rows)):
            loss_of(item.outputs, item.index).backward()
            if (item.index + 1) % every == 0:
                rank.pipeline.invalidate()
                descend(rank.stages.values())
        rank.pipeline.flush()
        truth = [Layer(stage) for stage in range(rank.graph.num_stages)]
        for number, microbatch in enumerate(batch(rows)):
            hidden = microbatch.inputs[0]
            for layer in truth:
                hidden = layer(hidden)
            loss_of(hidden, number).backward()
            if (number + 1) % every == 0:
                descend(truth)
        for number, stage in rank.stages.items():
            for (name, found), expected in zip(stage.named_parameters(), truth[number].parameters(), strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-6, msg=f"{name} of stage {number}")

    on_ranks(on_rank, 3, schedule)


@pytest.mark.parametrize("schedule", pe.SCHEDULES)
def test_a_caller_may_meet_the_other_ranks_anywhere_in_his_loop(schedule: str) -> None:
    meeting = Barrier(3, timeout=10.0)  # as a collective of the caller's own would

    def on_rank(rank: Rank) -> None:
        for item in rank.pipeline.stream(batch(ROWS)):
            meeting.wait()
            loss_of(item.outputs, item.index).backward()
            meeting.wait()
        rank.check_gradients(range(len(ROWS)), ROWS)

    on_ranks(on_rank, 3, schedule)


@torch.no_grad()
def descend(layers: Iterable[torch.nn.Module]) -> None:
    """An optimizer step that leaves no trace which a pipeline could see."""
    for layer in layers:
        for parameter in layer.parameters():
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-0.01)
            parameter.grad = None
