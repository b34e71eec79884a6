"""Waves through a real pipeline: added and taken while the caller goes on, they give the gradients of one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline_engine as pe
from tests.run.playing import Rank, batch, loss_of, on_ranks, total
from tests.strategies import schedule_names


@settings(max_examples=60)
@given(
    schedule_names,
    st.integers(1, 4),
    st.lists(st.integers(0, 4), max_size=5),
    st.integers(0, 3),
    st.sampled_from(["each wave", "all at the end", "invalidate", "every other"]),
)
def test_gradients_and_outputs_are_those_of_one_process(
    schedule: str, ranks: int, sizes: list[int], horizon: int, gives: str
) -> None:
    rows = [1 + number % 5 for number in range(sum(sizes))]
    firsts = [sum(sizes[:place]) for place in range(len(sizes) + 1)]

    def caller(rank: Rank) -> None:
        microbatches, waves, added = batch(rows), rank.pipeline.waves(), 0
        losses, given = [], []
        for place in range(len(sizes)):
            while added < min(len(sizes), place + 1 + horizon):
                waves.add(microbatches[firsts[added] : firsts[added + 1]])
                added += 1
            numbers = range(firsts[place], firsts[place + 1])
            losses = [loss_of(out, number) for out, number in zip(waves.take(), numbers, strict=True)] + (
                losses if gives == "all at the end" else []
            )
            if gives == "invalidate":
                rank.pipeline.invalidate()
            if losses and (gives in ("each wave", "invalidate") or (gives == "every other" and place % 2)):
                total(losses).backward()
                given += numbers
        waves.end()
        if gives == "all at the end" and losses:
            total(losses).backward()
            given += range(len(rows))
        rank.check_gradients(given, rows)

    on_ranks(caller, ranks, schedule)


def test_nothing_runs_that_was_not_added() -> None:
    def caller(rank: Rank) -> list[str]:
        microbatches, waves = batch([1] * 6), rank.pipeline.waves()
        waves.add(microbatches[:2])
        waves.add(microbatches[2:4])
        assert waves.waiting == 2
        total(out.sum() for out in waves.take()).backward()
        seen = list(rank.log)
        waves.add(microbatches[4:])
        total(out.sum() for out in waves.take()).backward()
        waves.end()
        return seen

    first, last = on_ranks(caller, 2)
    assert first == ["0F0", "0F1", "0F2", "0F3", "0B0", "0B1"]
    assert last == ["1F0", "1F1", "1B0", "1B1"]


def test_what_is_given_of_a_wave_is_complete_when_the_backward_call_returns() -> None:
    def caller(rank: Rank) -> list[str]:
        waves = rank.pipeline.waves()
        waves.add(batch([1, 1, 1, 1]))
        outputs = waves.take()
        (outputs[1].sum() + outputs[3].sum()).backward()
        seen = [action for action in rank.log if "B" in action]
        assert waves.open == {0}
        outputs[0].sum().backward()
        waves.end()
        return seen

    assert on_ranks(caller, 2) == [["0B1", "0B3"], ["1B1", "1B3"]]


def test_without_gradients_and_after_a_wave_of_none() -> None:
    def caller(rank: Rank) -> list[int]:
        with torch.no_grad():
            waves = rank.pipeline.waves()
            waves.add([])
            waves.add(batch([2, 3]))
            sizes = [len(waves.take()), len(waves.take())]
            waves.end()
        return sizes

    assert on_ranks(caller, 3) == [[0, 2]] * 3


def test_mistakes_are_told() -> None:
    def caller(rank: Rank) -> None:
        waves = rank.pipeline.waves()
        with pytest.raises(pe.UsageError, match="there is no wave to take: add one before"):
            waves.take()
        waves.add(batch([1]))
        (output,) = waves.take()
        with pytest.raises(pe.UsageError, match="a stream of this pipeline is still running"):
            rank.pipeline.waves()
        waves.end()
        rank.pipeline.flush()
        with pytest.raises(pe.UsageError, match="it ended when the pipeline was flushed"):
            waves.add(batch([1]))
        with pytest.raises(pe.UsageError, match="which was dropped when the pipeline was flushed"):
            output.sum().backward()

    on_ranks(caller)
