"""The registry, walked: what a page draws and claims is what its function builds."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.plan.actions import Backward, BackwardInput, BackwardWeight, Forward
from tests.oracles.golden import MAKESPANS, PEAKS
from tests.strategies import chain_for, schedules


def page(name: str) -> str:
    return pe.SCHEDULES[name].page


def picture(name: str) -> str:
    """The programs of a page's picture, as ``Schedule.to_text`` writes them."""
    return "\n".join(re.findall(r"^    rank \d+   (.*)$", page(name), re.MULTILINE))


@pytest.mark.parametrize("name", pe.SCHEDULES)
def test_the_picture_of_a_page_is_what_the_function_builds(name: str) -> None:
    ranks = len(picture(name).split("\n"))
    numbers = [tuple(map(int, re.split("[FBIW]", word))) for word in picture(name).split()]
    stages, m = (1 + max(each) for each in zip(*numbers, strict=True))
    assert ranks >= 2
    assert pe.build(name, chain_for(name, ranks, stages // ranks), m).to_text() == picture(name)


@pytest.mark.parametrize("name", pe.SCHEDULES)
def test_a_page_names_cost_and_source(name: str) -> None:
    for word in ("Bubble:", "seconds", "Held on", "Source:"):
        assert word in page(name)


def costs_of_ranks(stages_each: int, f: float = 1.0, i: float = 1.0, w: float = 1.0) -> pe.Costs:
    """A rank's work split over its stages."""
    return pe.Costs(forward=f / stages_each, backward_input=i / stages_each, backward_weight=w / stages_each)


@pytest.mark.parametrize(("name", "each", "ranks", "m"), MAKESPANS)
def test_the_simulator_finds_the_golden_makespan(name: str, each: int, ranks: int, m: int) -> None:
    timeline = pe.simulate(pe.build(name, chain_for(name, ranks, each), m), costs_of_ranks(each))
    assert timeline.makespan == MAKESPANS[name, each, ranks, m]
    assert timeline.bubble == pytest.approx(1 - 3 * m / timeline.makespan)


@pytest.mark.parametrize(("name", "each", "ranks", "m"), PEAKS)
def test_the_simulator_finds_the_golden_peak(name: str, each: int, ranks: int, m: int) -> None:
    timeline = pe.simulate(pe.build(name, chain_for(name, ranks, each), m), pe.Costs())
    assert max(timeline.peak_in_flight) / each == PEAKS[name, each, ranks, m]


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(0, 19), st.integers(1, 9), st.integers(1, 9))
def test_bubble_and_memory_are_what_the_page_promises(name: str, ranks: int, extra: int, f: int, b: int) -> None:
    m = ranks + extra
    timeline = pe.simulate(pe.build(name, chain_for(name, ranks), m), costs_of_ranks(1, f, b, 0))
    held = {"gpipe": [m] * ranks, "1f1b": [min(ranks - rank, m) for rank in range(ranks)]}
    assert timeline.makespan == pytest.approx((m + ranks - 1) * (f + b))
    assert list(timeline.peak_in_flight) == held[name]


@given(schedules())
def test_no_schedule_beats_the_work_that_a_rank_has(schedule: pe.Schedule) -> None:
    each = schedule.graph.num_stages // schedule.graph.num_ranks
    timeline = pe.simulate(schedule, costs_of_ranks(each))
    assert timeline.makespan >= 3 * schedule.num_microbatches - 1e-9
    assert max(timeline.peak_in_flight) <= each * schedule.num_microbatches


@given(schedules())
def test_every_stage_takes_the_microbatches_in_order(schedule: pe.Schedule) -> None:
    every = list(range(schedule.num_microbatches))
    for program in schedule.programs:
        for stage in {action.stage for action in program}:
            own = [action for action in program if action.stage == stage]
            assert [action.microbatch for action in own if isinstance(action, Forward)] == every
            assert [action.microbatch for action in own if isinstance(action, (Backward, BackwardInput))] == every
            assert [action.microbatch for action in own if isinstance(action, (Backward, BackwardWeight))] == every


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(pe.ScheduleError, match=r"schedule 'magic' is unknown; one of 'gpipe', '1f1b'"):
        pe.build("magic", pe.StageGraph.chain(2, 2), 4)


@pytest.mark.parametrize("name", pe.SCHEDULES)
def test_a_negative_number_of_microbatches_is_refused(name: str) -> None:
    with pytest.raises(pe.ScheduleError, match="num_microbatches is -1; it is 0 or more"):
        pe.build(name, chain_for(name, 2), -1)


@pytest.mark.parametrize("name", [name for name in pe.SCHEDULES if name != "gpipe"])
def test_a_graph_that_does_not_fit_is_refused_with_the_one_that_does(name: str) -> None:
    wrong = pe.StageGraph([(0, 1), (1, 2), (2, 3)], [1, 0, 0, 1])
    with pytest.raises(pe.ScheduleError, match=rf"schedule '{name}' wants .*; got rank_of \[1, 0, 0, 1\]"):
        pe.build(name, wrong, 4)
