"""The page's smallest form: what a schedule must hold is held, and one microbatch more would be seen."""

from __future__ import annotations

from benchmarks.memory import Case, Settings, held_on_rank
from benchmarks.transformer import Shape
from pipeline_engine.launch import run_ranks

SHAPE = Shape(
    layers=8, hidden=32, heads=2, vocabulary=64, tokens=256
)  # a layer's weights are a third of its activation


def test_a_rank_holds_the_activations_of_its_schedule_and_less_than_one_more() -> None:
    cases = (Case("1f1b", 2, 6), Case("interleaved", 2, 6))
    settings = Settings(cases, 1, SHAPE)
    for rank, helds in enumerate(run_ranks(held_on_rank, 2, settings, timeout=100.0)):
        for case, held in zip(cases, helds, strict=True):
            for driver in ("stream", "step"):
                over = held.peaks[driver][0] - held.theory
                assert 0 <= over < held.activation, (case, rank, driver, over, held.activation)
