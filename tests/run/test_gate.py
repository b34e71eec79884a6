"""The gate: what the caller may do with an output and with his backward, and what is refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import pipeline_engine as pe
from tests.oracles.plain import gradients_of
from tests.run.playing import ROWS, Rank, batch, loss_of, on_ranks, plain, total


def test_the_sum_of_several_losses_is_one_backward_and_the_engine_decides_the_order() -> None:
    def on_rank(rank: Rank) -> list[str]:
        held = []
        for item in rank.pipeline.stream(batch(ROWS)):
            held.append(loss_of(item.outputs, item.index))
            if len(held) == 3:
                total(held).backward()
                held = []
        total(held).backward()
        rank.check_gradients(range(5), ROWS)
        return [word for word in rank.log if "B" in word]

    assert on_ranks(on_rank, 2) == [[f"{rank}B{number}" for number in range(5)] for rank in (0, 1)]


@pytest.mark.parametrize("schedule", pe.SCHEDULES)
def test_gradients_given_in_another_order_than_yielded_are_right(schedule: str) -> None:
    def on_rank(rank: Rank) -> list[str]:
        outputs = rank.pipeline.forward(batch(ROWS))
        for number in (2, 0, 4, 1, 3):
            loss_of(outputs[number], number).backward()
        rank.pipeline.flush()
        truth = plain(rank.graph.num_stages, ROWS)
        for number, stage in rank.stages.items():
            for name, parameter in stage.named_parameters():
                torch.testing.assert_close(parameter.grad, truth.summed(number, range(5))[name], rtol=1e-5, atol=1e-4)
        return rank.log

    on_ranks(on_rank, 3, schedule)


@pytest.mark.parametrize("entry", ["stream", "forward"])
def test_outputs_are_fresh_and_may_be_changed_in_place_on_every_rank(entry: str) -> None:
    def loss_in_place(output: torch.Tensor, number: int) -> torch.Tensor:
        assert not output._is_view() and output.is_contiguous()
        output.div_(0.5)
        return loss_of(output / 2, number)

    def on_rank(rank: Rank) -> None:
        if entry == "stream":
            for item in rank.pipeline.stream(batch(ROWS)):
                loss_in_place(item.outputs, item.index).backward()
        else:
            outputs = rank.pipeline.forward(batch(ROWS))
            total(loss_in_place(output, number) for number, output in enumerate(outputs)).backward()
        rank.check_gradients(range(5), ROWS)

    on_ranks(on_rank, 3)


def test_a_second_backward_without_retain_graph_is_refused_as_in_plain_autograd() -> None:
    def on_rank(rank: Rank) -> None:
        for item in rank.pipeline.stream(batch(ROWS)):
            loss_of(item.outputs, item.index).backward()
            with pytest.raises(RuntimeError, match="second time"):
                loss_of(item.outputs, item.index).backward()
        rank.check_gradients(range(5), ROWS)

    on_ranks(on_rank, 3)


def test_a_retained_graph_gives_its_gradient_twice() -> None:
    def on_rank(rank: Rank) -> None:
        for item in rank.pipeline.stream(batch(ROWS)):
            loss_of(item.outputs, item.index).backward(retain_graph=True)
            loss_of(item.outputs, item.index).backward()
        rank.check_gradients([0, 0, 1, 1, 2, 2, 3, 3, 4, 4], ROWS)

    on_ranks(on_rank, 3)


@pytest.mark.parametrize("schedule", pe.SCHEDULES)
@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_second_backward_may_come_before_the_first_was_performed(schedule: str, at: int) -> None:
    """It is given while others are open, which stand before it; then all, and it again, by one backward."""

    def on_rank(rank: Rank) -> None:
        outputs = rank.pipeline.forward(batch(ROWS))
        (2 * loss_of(outputs[at], at)).backward(retain_graph=True)
        total(loss_of(output, number) for number, output in enumerate(outputs)).backward()
        rank.pipeline.flush()
        truth = plain(rank.graph.num_stages, ROWS)
        for number, stage in rank.stages.items():
            expected = truth.summed(number, [at, at, *range(5)])
            for name, grad in gradients_of(stage).items():
                torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-4)

    on_ranks(on_rank, 2, schedule)


def test_two_losses_over_one_output_are_one_gradient_if_they_are_added() -> None:
    def on_rank(rank: Rank) -> None:
        for item in rank.pipeline.stream(batch(ROWS)):
            loss = loss_of(item.outputs, item.index)
            (0.25 * loss + 0.75 * loss).backward()
        rank.check_gradients(range(5), ROWS)

    on_ranks(on_rank, 2)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_create_graph_is_refused() -> None:
    def on_rank(rank: Rank) -> None:
        for item in rank.pipeline.stream(batch([2])):
            with pytest.raises(pe.UsageError, match=r"create_graph=True: a pipeline keeps no graph of its backward"):
                loss_of(item.outputs, 0).backward(create_graph=True)

    on_ranks(on_rank)


class Bomb(torch.autograd.Function):
    """Raises in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in the caller's graph")


@pytest.mark.parametrize("first", [True, False])
def test_a_backward_that_raises_elsewhere_in_the_callers_graph_leaves_nothing_behind(first: bool) -> None:
    """The engine's callback never runs; what the gates may have recorded is forgotten."""

    def on_rank(rank: Rank) -> None:
        weight = torch.ones((), requires_grad=True)
        for item in rank.pipeline.stream(batch(ROWS)):
            if item.index == 1:
                bomb, loss = (Bomb.apply(weight), loss_of(item.outputs, 1))
                with pytest.raises(ZeroDivisionError):
                    (bomb + loss if first else loss + bomb).backward()
            else:
                loss_of(item.outputs, item.index).backward()
        rank.check_gradients([0, 2, 3, 4], ROWS)

    on_ranks(on_rank, 3)


def test_a_backward_inside_of_another_does_not_lose_what_the_outer_one_has_given() -> None:
    """A reentrant checkpoint whose function uses an output differentiates it by a backward of its own."""

    def on_rank(rank: Rank) -> None:
        weight, losses = torch.ones((), requires_grad=True), []
        for item in rank.pipeline.stream(batch(ROWS)):

            def loss(scale: torch.Tensor, item: pe.Yielded = item) -> torch.Tensor:
                return scale * loss_of(item.outputs, item.index)

            inside = item.index in (0, 3)
            losses.append(checkpoint(loss, weight, use_reentrant=True) if inside else loss(weight))
        total(losses).backward()
        rank.pipeline.flush()
        truth = plain(rank.graph.num_stages, ROWS)
        for name, grad in gradients_of(rank.stage).items():
            expected = truth.summed(rank.number, range(5))[name]
            torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-4)

    on_ranks(on_rank, 3)


def test_a_pipeline_that_is_called_inside_of_a_backward_does_not_lose_a_gradient_without_a_word() -> None:
    def on_rank(rank: Rank) -> None:
        weight = torch.ones((), requires_grad=True)
        weight.register_hook(lambda _: rank.pipeline.meet())
        first = weight * 1  # older than the output: autograd comes to it last
        for item in rank.pipeline.stream(batch([2])):
            with pytest.raises(pe.UsageError, match="called inside of a backward call that had given it gradients"):
                (first + loss_of(item.outputs, 0)).backward()

    on_ranks(on_rank)


def test_a_gradient_taken_by_autograd_grad_counts_as_given() -> None:
    """``torch.autograd.grad`` that passes a gate drives the pipeline as ``backward`` does."""

    def on_rank(rank: Rank) -> None:
        scale = torch.ones((), requires_grad=True)
        for item in rank.pipeline.stream(batch(ROWS)):
            loss_of(item.outputs * scale, item.index).backward()
        rank.check_gradients(range(5), ROWS)
        assert scale.grad is not None

    on_ranks(on_rank, 2)


def test_the_callers_own_parameters_get_their_gradients_on_every_rank() -> None:
    def on_rank(rank: Rank) -> torch.Tensor | None:
        head = torch.full((8,), 0.5, requires_grad=True)
        for item in rank.pipeline.stream(batch(ROWS)):
            (item.outputs * head).square().sum().backward()
        return head.grad

    first, second, third = on_ranks(on_rank, 3)
    assert first is not None and torch.equal(first, second) and torch.equal(second, third)  # type: ignore[arg-type]


@pytest.mark.parametrize("with_backward", [True, False])
def test_outputs_that_the_caller_lets_go_of_are_freed_without_the_garbage_collector(with_backward: bool) -> None:
    def on_rank(rank: Rank) -> list[bool]:
        alive = []
        for item in rank.pipeline.stream(batch(ROWS)):
            alive.append(weakref.ref(item.outputs))
            if with_backward:
                loss_of(item.outputs, item.index).backward()
        del item
        return [output() is not None for output in alive]

    gc.disable()
    try:
        assert on_ranks(on_rank, 3) == [[False] * 5] * 3
    finally:
        gc.enable()
