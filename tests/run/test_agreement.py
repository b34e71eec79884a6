"""Ranks that do not mean the same find out before anything moves, all of them, and can go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pipeline_engine as pe
from pipeline_engine.run.agreement import agree
from pipeline_engine.run.transports.base import Transport
from pipeline_engine.testing import run_ranks_in_threads
from tests.run.playing import ROWS, Rank, batch, loss_of, on_ranks

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


def test_every_rank_is_told_the_same_of_several_disagreements() -> None:
    def on_rank(transport: Transport) -> str:
        word = {f"thing {number}": transport.rank for number in range(20)}
        with pytest.raises(pe.UsageError) as caught:
            agree(transport, word, deadline=20)
        return str(caught.value)

    told = run_ranks_in_threads(on_rank, 3)
    assert set(told) == {
        "ranks disagree on the thing 0: rank 0 has 0, rank 1 has 1; every rank of a pipeline makes the same calls."
    }
