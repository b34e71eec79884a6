"""Who may use a pipeline."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

import pipeline_engine as pe
from pipeline_engine.run.owner import Owner
from tests.run.playing import Rank, batch, on_ranks


def test_a_call_from_another_thread_is_refused_and_harms_nothing() -> None:
    def on_rank(rank: Rank) -> None:
        with ThreadPoolExecutor(1) as pool, pytest.raises(pe.UsageError, match="was built in another thread"):
            pool.submit(rank.pipeline.forward, batch([1])).result()
        rank.train([2, 1])
        rank.check_gradients(range(2), [2, 1])

    on_ranks(on_rank, 2)


def test_a_forked_child_is_told_to_build_its_own() -> None:
    owner = Owner()
    owner.check()
    object.__setattr__(owner, "process", owner.process + 1)  # as a child that inherited it sees it
    with pytest.raises(pe.UsageError, match="has forked since the pipeline was built"):
        owner.check()
