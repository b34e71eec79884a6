"""Ranks that do not mean the same find out before anything moves, all of them, and can go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pipeline_engine as pe
from pipeline_engine.run import agreement
from pipeline_engine.run.agreement import Word, agree
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.testing import run_ranks_in_threads
from tests.run.playing import ROWS, Layer, Rank, batch, loss_of, on_ranks

Caller = Callable[[pe.Pipeline], Any]


@pytest.mark.parametrize(
    ("words", "one", "other"),
    [
        (
            "number of microbatches: rank 0 has 2, rank 1 has 3",
            lambda p: p.stream(batch([1, 1])),
            lambda p: p.stream(batch([1] * 3)),
        ),
        ("entry point: rank 0 has 'stream', rank 1 has 'forward'", lambda p: p.stream([]), lambda p: p.forward([])),
        ("entry point: rank 0 has 'flush', rank 1 has 'stream'", lambda p: p.flush(), lambda p: p.stream([])),
        (
            "grad mode: rank 0 has True, rank 1 has False",
            lambda p: p.stream([]),
            torch.no_grad()(lambda p: p.stream([])),
        ),
        (
            r"inputs of microbatch 1: rank 0 has 'float32\[1, 8\]', rank 1 has 'float32\[2, 8\]'",
            lambda p: p.forward(batch([1, 1])),
            lambda p: p.forward(batch([1, 2])),
        ),
        (
            r"inputs of microbatch 0: rank 0 has 'float32\[1, 8\]', rank 1 has 'bfloat16\[1, 8\]'",
            lambda p: p.stream([pe.Microbatch((torch.zeros(1, 8),))]),
            lambda p: p.stream([pe.Microbatch((torch.zeros(1, 8, dtype=torch.bfloat16),))]),
        ),
        (
            r"shared 'mask' of microbatch 0: rank 0 has 'bool\[3\]', rank 1 has 'bool\[4\]'",
            lambda p: p.stream([pe.Microbatch(shared={"mask": torch.ones(3, dtype=torch.bool)})]),
            lambda p: p.stream([pe.Microbatch(shared={"mask": torch.ones(4, dtype=torch.bool)})]),
        ),
    ],
)
def test_ranks_that_disagree_all_find_out_and_can_go_on(words: str, one: Caller, other: Caller) -> None:
    def on_rank(rank: Rank) -> None:
        with pytest.raises(pe.UsageError, match=f"ranks disagree on the {words}; every rank of a pipeline makes the"):
            (one, other)[rank.number](rank.pipeline)
        rank.train(ROWS)
        rank.check_gradients(range(len(ROWS)), ROWS)

    on_ranks(on_rank)


def test_callers_who_did_different_things_find_out_at_the_flush() -> None:
    def on_rank(rank: Rank) -> None:
        for item in rank.pipeline.stream(batch([1, 1])):
            if (rank.number, item.index) != (0, 1):
                loss_of(item.outputs, item.index).backward()
        with pytest.raises(pe.UsageError, match="ranks disagree on the history of call 0: rank 0 has 'stream: "):
            rank.pipeline.flush()

    on_ranks(on_rank, 2, "gpipe")


def skips(*numbers: int) -> Callable[[pe.Pipeline, list[pe.Yielded]], None]:
    return lambda pipeline, items: [pipeline.skip(items[number]) for number in numbers][-1]


def gives(*, retain_graph: bool) -> Callable[[pe.Pipeline, list[pe.Yielded]], None]:
    return lambda pipeline, items: loss_of(items[0].outputs, 0).backward(retain_graph=retain_graph)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (skips(0), skips(1)),
        (skips(0, 1, 2), skips(1, 0, 2)),
        (gives(retain_graph=True), gives(retain_graph=False)),
    ],
    ids=["which", "in which order", "retaining"],
)
def test_deeds_that_move_nothing_are_compared_too(one: Any, other: Any) -> None:
    """Which items were skipped, what came before the last deed, whether graphs are retained."""

    def on_rank(rank: Rank) -> None:
        (one, other)[rank.number](rank.pipeline, list(rank.pipeline.stream(batch([1, 1, 1]))))
        with pytest.raises(pe.UsageError, match="ranks disagree on the history of call 0: rank 0 has 'stream: "):
            rank.pipeline.flush()

    on_ranks(on_rank)


def test_every_rank_is_told_the_same_of_several_disagreements() -> None:
    def on_rank(transport: Transport) -> str:
        word = {f"thing {number}": transport.rank for number in range(20)}
        with pytest.raises(pe.UsageError) as caught:
            agree(transport, Word(word, {}, None), deadline=20)
        return str(caught.value)

    told = run_ranks_in_threads(on_rank, 3)
    assert set(told) == {
        "ranks disagree on the thing 0: rank 0 has 0, rank 1 has 1; every rank of a pipeline makes the same calls."
    }


@pytest.mark.parametrize("other", ["gpipe", "zb-h1"])
def test_ranks_with_different_schedules_find_out_before_anything_moves(other: str) -> None:
    def on_rank(transport: Transport) -> None:
        rank = Rank(transport, other if transport.rank else "1f1b")
        with pytest.raises(pe.UsageError, match=f"the schedule: rank 0 has '1f1b', rank 1 has '{other}'"):
            rank.train(ROWS)
        assert not rank.log
        rank.pipeline.close()

    run_ranks_in_threads(on_rank, 2)


def test_schedules_of_one_name_with_different_programs_are_told_apart() -> None:
    def on_rank(transport: Transport) -> None:
        graph = pe.StageGraph.chain(2, 2)
        stages = {transport.rank: Layer(transport.rank)}
        for differ, words in (({"max_in_flight": 1 + transport.rank}, "max_in_flight: rank 0 has 1, rank 1 has 2"),):
            pipeline = pe.Pipeline(stages, graph=graph, schedule="1f1b", transport=transport, **differ)
            with pytest.raises(pe.UsageError, match=words):
                pipeline.stream(batch(ROWS))
        pipeline.close()

    run_ranks_in_threads(on_rank, 2)


def test_what_a_rank_does_not_pass_is_not_compared() -> None:
    """Inputs are read on the first stage's rank only."""

    def on_rank(rank: Rank) -> None:
        data = batch(ROWS)
        if rank.number:
            data = [pe.Microbatch(shared=each.shared) for each in data]
        for item in rank.pipeline.stream(data):
            loss_of(item.outputs, item.index).backward()
        rank.check_gradients(range(len(ROWS)), ROWS)

    on_ranks(on_rank, 3)


def test_a_rank_that_cannot_plan_a_call_is_named_and_the_running_stream_goes_on() -> None:
    def on_rank(rank: Rank) -> None:
        for item in rank.pipeline.stream(batch(ROWS)):
            if item.index == 2 and rank.number == 1:
                with pytest.raises(pe.UsageError, match="the number of microbatches is unknown"):
                    rank.pipeline.forward(iter([]))
            elif item.index == 2:
                with pytest.raises(
                    pe.PeerFailedError, match="rank 1 failed while it performed the planning of forward"
                ):
                    rank.pipeline.forward([])
            loss_of(item.outputs, item.index).backward()
        rank.check_gradients(range(len(ROWS)), ROWS)

    on_ranks(on_rank, 3)


def test_ranks_that_a_failure_made_count_their_calls_differently_go_on_with_the_highest() -> None:
    def on_rank(rank: Rank) -> int:
        rank.pipeline._accord.count += rank.number  # as if the others had been told before their call began
        rank.train(ROWS)
        rank.check_gradients(range(len(ROWS)), ROWS)
        return rank.pipeline._accord.count

    assert on_ranks(on_rank, 3) == [3, 3, 3]


# Who strays.


def word(past: dict[int, bytes]) -> bytes:
    return agreement._packed(Word({"entry point": "flush", "history of call 0": "theirs"}, past, None))


@pytest.mark.parametrize("theirs", [b"aaaabbbb", b"aaaabbbbcccc"])
def test_a_rank_that_has_done_all_that_this_one_has_may_only_be_faster(theirs: bytes) -> None:
    assert agreement.strayed(1, word({0: theirs}), {0: (b"aaaabbbb", "ours")}) is None
    assert agreement.strayed(1, word({}), {0: (b"aaaabbbb", "ours")}) is None
    assert agreement.strayed(1, b"of another exchange", {0: (b"aaaabbbb", "ours")}) is None


@pytest.mark.parametrize("theirs", [b"", b"aaaa", b"aaaaxxxxcccc"])
def test_a_rank_that_is_in_its_next_call_and_has_done_less_or_something_else_has_strayed(theirs: bytes) -> None:
    failure = agreement.strayed(1, word({0: theirs}), {0: (b"aaaabbbb", "ours")})
    assert failure is not None and failure.rank == 1
    assert failure.cause == (
        "it is in its next call, flush, and has left call 0 after theirs; other ranks are still in it, after ours"
    )


class Failing(Layer):
    """A layer whose input gradient cannot be computed."""

    def forward(self, x: torch.Tensor, *, number: int = 0) -> torch.Tensor:
        y = super().forward(x, number=number)
        y.register_hook(self.fail)
        return y

    def fail(self, grad: torch.Tensor) -> torch.Tensor:
        if self.number == 0:
            raise ArithmeticError("no gradient for you")
        return grad


def test_ranks_that_meet_hear_of_a_failure_before_they_do_anything_else() -> None:
    """A rank whose part was done when another one failed would begin its next call alone."""

    def on_rank(rank: Rank) -> None:
        (output,) = rank.pipeline.forward(batch([1]))

        def give_and_meet() -> None:
            loss_of(output, 0).backward()
            rank.pipeline.meet()

        with pytest.raises((pe.PeerFailedError, ArithmeticError), match="no gradient for you"):
            give_and_meet()
        rank.pipeline.meet()
        (again,) = rank.pipeline.forward(batch([1]))
        assert torch.equal(again, output)

    on_ranks(on_rank, 3, make_stage=Failing)
