"""The page's smallest form: its losses and gradients are compared with one process before anything is timed."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")

from benchmarks.against_megatron import Settings, gpt, measure, table


def test_megatrons_schedules_and_this_engine_find_the_numbers_of_one_process() -> None:
    settings = Settings(("1f1b", "interleaved"), ranks=2, microbatches=4, repeats=1, load=gpt(hidden=32, tokens=8))
    seconds = measure(settings)
    assert [*seconds] == ["1f1b", "interleaved"]
    assert all([*by_driver] == ["stream", "step", "megatron"] for by_driver in seconds.values())
    assert table(seconds, settings).count("\n| 2 | ") == 2
