"""Which schedule a trainer runs of itself, and that it says so."""

from __future__ import annotations

import logging

import pytest

import pipeline_engine as pe
from art_adapter.scheduling import chain_of, log_choice, schedule_for


@pytest.mark.parametrize(("ranks", "chunks"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 3)])
def test_the_choice_is_lawful_for_any_number_of_microbatches(ranks: int, chunks: int) -> None:
    graph = chain_of(ranks=ranks, chunks=chunks)
    for count in range(1, 7):
        pe.check(pe.build(schedule_for(graph), graph, count))


def test_it_is_told_once_for_each_pipeline(caplog: pytest.LogCaptureFixture) -> None:
    graph = chain_of(ranks=2, chunks=2)
    with caplog.at_level(logging.INFO, "art_adapter"):
        for rank in range(2):
            log_choice(schedule_for(graph), graph, rank=rank, was_named=False)
    assert caplog.messages == ["schedule interleaved, chosen by the number of stages per rank: 4 stages on 2 ranks"]
