"""Microbatches are read once, in order, no sooner than they are needed, and let go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pipeline_engine as pe
from pipeline_engine.run.microbatches import Microbatches
from tests.run.playing import Rank, batch, loss_of, on_ranks


def test_an_iterator_is_read_as_far_as_it_is_needed() -> None:
    read: list[int] = []

    def source() -> Iterator[pe.Microbatch]:
        for number in range(5):
            read.append(number)
            yield pe.Microbatch((number,))

    microbatches = Microbatches(source(), 5, uses=1)
    assert (microbatches.count, read) == (5, [])
    assert microbatches[2].inputs == (2,) and read == [0, 1, 2]
    assert microbatches[0].inputs == (0,) and read == [0, 1, 2]


def test_a_microbatch_is_let_go_after_its_last_use() -> None:
    class Input:
        pass

    thing = Input()
    alive = weakref.ref(thing)
    things = [thing]
    microbatches = Microbatches((pe.Microbatch((things.pop(),)) for _ in range(1)), 1, uses=2)
    del thing
    assert microbatches[0] is not None
    microbatches.release(0)
    assert microbatches[0].inputs[0] is alive()
    microbatches.release(0)
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("source", "count", "words"),
    [
        (iter([]), None, "the number of microbatches is unknown: pass a sequence, or num_microbatches="),
        ([], 1, "num_microbatches is 1, but 0 microbatches were passed"),
        ([pe.Microbatch()], 2, "num_microbatches is 2, but 1 microbatches were passed"),
    ],
)
def test_a_wrong_number_is_refused_before_anything_is_read(source: Any, count: int | None, words: str) -> None:
    with pytest.raises(pe.UsageError, match=words):
        Microbatches(source, count, uses=1)


def test_a_source_that_ends_too_soon_is_named() -> None:
    microbatches = Microbatches(iter([pe.Microbatch()]), 2, uses=1)
    with pytest.raises(pe.UsageError, match="there are 1 microbatches, but 2 were announced"):
        microbatches[1]


def test_what_is_no_microbatch_is_refused_with_the_cure() -> None:
    with pytest.raises(pe.UsageError, match=r"microbatch 0 is a Tensor; wrap .*: pe.Microbatch\(inputs=\(tensor,\)\)"):
        Microbatches([torch.ones(1)], None, uses=1)[0]  # type: ignore[list-item]


@pytest.mark.parametrize("weight", [0, -1.0])
def test_a_weight_is_positive(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        pe.Microbatch(weight=weight)


def test_a_pipeline_reads_its_inputs_as_late_as_the_schedule_allows() -> None:
    def on_rank(rank: Rank) -> list[int]:
        read: list[int] = []

        def lazily() -> Iterator[pe.Microbatch]:
            for number, microbatch in enumerate(batch([1] * 6)):
                read.append(number)
                yield microbatch

        lengths = []
        for item in rank.pipeline.stream(lazily(), num_microbatches=6):
            lengths.append(len(read))
            loss_of(item.outputs, item.index).backward()
        return lengths

    assert on_ranks(on_rank, 3) == [[3, 4, 5, 6, 6, 6], [2, 3, 4, 5, 6, 6], [1, 2, 3, 4, 5, 6]]
