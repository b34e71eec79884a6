"""The registry, walked: what a page draws and claims is what its function builds."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.plan.actions import BACKWARD, Backward, Forward
from tests.oracles.golden import MAKESPANS, PEAKS
from tests.strategies import schedule_names, schedules


def page(name: str) -> str:
    return sys.modules[pe.SCHEDULES[name].__module__].__doc__ or ""


def picture(name: str) -> list[list[str]]:
    """For each rank of a page's picture its words."""
    return [words.split() for words in re.findall(r"^    rank \d+   (.*)$", page(name), re.MULTILINE)]


@pytest.mark.parametrize("name", pe.SCHEDULES)
def test_the_picture_of_a_page_is_what_the_function_builds(name: str) -> None:
    drawn = picture(name)
    ranks = len(drawn)
    m = 1 + max(int(word[1:]) for words in drawn for word in words)
    schedule = pe.build(name, pe.StageGraph.chain(ranks, ranks), m)
    assert ranks >= 2
    assert drawn == [[str(action).lstrip("0123456789") for action in program] for program in schedule.programs]


@pytest.mark.parametrize("name", pe.SCHEDULES)
def test_a_page_names_cost_and_source(name: str) -> None:
    for word in ("Bubble:", "seconds", "Held on", "Source:"):
        assert word in page(name)


@pytest.mark.parametrize(("name", "ranks", "m"), MAKESPANS)
def test_the_simulator_finds_the_golden_makespan(name: str, ranks: int, m: int) -> None:
    timeline = pe.simulate(pe.build(name, pe.StageGraph.chain(ranks, ranks), m), pe.Costs())
    assert timeline.makespan == MAKESPANS[name, ranks, m]
    assert timeline.bubble == pytest.approx(1 - 3 * m / timeline.makespan)


@pytest.mark.parametrize(("name", "ranks", "m"), PEAKS)
def test_the_simulator_finds_the_golden_peak(name: str, ranks: int, m: int) -> None:
    timeline = pe.simulate(pe.build(name, pe.StageGraph.chain(ranks, ranks), m), pe.Costs())
    assert max(timeline.peak_in_flight) == PEAKS[name, ranks, m]


@given(schedule_names, st.integers(1, 8), st.integers(0, 19), st.integers(1, 9), st.integers(1, 9))
def test_bubble_and_memory_are_what_the_page_promises(name: str, ranks: int, extra: int, f: int, b: int) -> None:
    """Each page's formulas, written down once more; a schedule without an entry here fails."""
    m = ranks + extra
    timeline = pe.simulate(
        pe.build(name, pe.StageGraph.chain(ranks, ranks), m), pe.Costs(forward=f, backward_input=b, backward_weight=0)
    )
    formulas = {"gpipe": [m] * ranks, "1f1b": [min(ranks - rank, m) for rank in range(ranks)]}
    assert timeline.makespan == pytest.approx((m + ranks - 1) * (f + b))
    assert list(timeline.peak_in_flight) == formulas[name]


@given(schedules())
def test_every_rank_does_its_own_stage_on_every_microbatch(schedule: pe.Schedule) -> None:
    m = schedule.num_microbatches
    for rank, program in enumerate(schedule.programs):
        assert [action for action in program if isinstance(action, Forward)] == [Forward(rank, k) for k in range(m)]
        assert [action for action in program if isinstance(action, BACKWARD)] == [Backward(rank, k) for k in range(m)]


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(pe.ScheduleError, match=r"schedule 'magic' is unknown; one of 'gpipe', '1f1b'"):
        pe.build("magic", pe.StageGraph.chain(2, 2), 4)


@pytest.mark.parametrize("name", pe.SCHEDULES)
def test_a_graph_or_number_that_does_not_fit_is_refused(name: str) -> None:
    with pytest.raises(pe.ScheduleError, match="num_microbatches is -1; it is 0 or more"):
        pe.build(name, pe.StageGraph.chain(2, 2), -1)
    with pytest.raises(pe.ScheduleError, match=r"runs on a straight chain.* rank_of \[0, 1, 0, 1\]"):
        pe.build(name, pe.StageGraph.chain(4, 2, "looped"), 4)
