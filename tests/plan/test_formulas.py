"""What each page promises of bubble and memory, written down once more and held against the simulator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline_engine as pe
from tests.strategies import chain_for, schedules

Formula = Callable[[int, int, int, float, float, float], float]
"""Of p ranks, v stages on each, m microbatches, and a rank's f, i and w."""

BUBBLES: dict[str, Formula] = {
    "gpipe": lambda p, v, m, f, i, w: (p - 1) * (f + i + w),
    "1f1b": lambda p, v, m, f, i, w: (p - 1) * (f + i + w),
    "interleaved": lambda p, v, m, f, i, w: (p - 1) * (f + i + w) / v,
    "looped-bfs": lambda p, v, m, f, i, w: (p - 1) * (f + i + w) / v,
    "zb-h1": lambda p, v, m, f, i, w: (p - 1) * (f + i - w),
    "zb-v": lambda p, v, m, f, i, w: (p - 1) * f / 2,
    "dualpipe-v": lambda p, v, m, f, i, w: (p - 1) * f / 2,
}
HELD: dict[str, Callable[[int, int, int, int], int]] = {
    "gpipe": lambda p, v, m, r: v * m,
    "1f1b": lambda p, v, m, r: min(p - r, m),
    "interleaved": lambda p, v, m, r: min(v * m, (v - 1) * p + 2 * (p - r) - 1),
    "looped-bfs": lambda p, v, m, r: v * m,
    "zb-h1": lambda p, v, m, r: min(p, m),
    "zb-v": lambda p, v, m, r: 2 * p,
    "dualpipe-v": lambda p, v, m, r: 2 * p + 1,
}
UNEQUAL = ["gpipe", "1f1b", "interleaved", "looped-bfs"]  # whose formulas do not ask for f = i = w


def stages_each(name: str, wanted: int) -> int:
    return chain_for(name, 1, wanted).num_stages


@pytest.mark.parametrize("name", pe.SCHEDULES)
@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(2, 3), st.integers(1, 4))
def test_with_equal_costs_the_bubble_is_what_the_page_promises(name: str, p: int, wanted: int, rounds: int) -> None:
    v, m = stages_each(name, wanted), 2 * p * rounds
    timeline = pe.simulate(pe.build(name, chain_for(name, p, v), m), pe.Costs(1 / v, 1 / v, 1 / v))
    assert timeline.makespan - 3 * m == pytest.approx(BUBBLES[name](p, v, m, 1, 1, 1))


@pytest.mark.parametrize("name", UNEQUAL)
@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 9), st.integers(0, 9))
def test_with_other_costs_too_where_the_page_says_so(name: str, p: int, rounds: int, f: int, b: int) -> None:
    v, m = stages_each(name, 2), p * rounds
    timeline = pe.simulate(pe.build(name, chain_for(name, p, v), m), pe.Costs(f / v, b / v, 0))
    assert timeline.makespan - m * (f + b) == pytest.approx(BUBBLES[name](p, v, m, f, b, 0))


@pytest.mark.parametrize("name", pe.SCHEDULES)
@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(2, 3), st.integers(1, 3))
def test_no_rank_holds_more_than_the_page_says(name: str, p: int, wanted: int, rounds: int) -> None:
    v, m = stages_each(name, wanted), p * rounds
    timeline = pe.simulate(pe.build(name, chain_for(name, p, v), m), pe.Costs())
    promised = [HELD[name](p, v, m, rank) for rank in range(p)]
    assert all(held <= most for held, most in zip(timeline.peak_in_flight, promised, strict=True))
    if rounds == 3:
        assert max(timeline.peak_in_flight) == max(promised)


@settings(max_examples=30)
@given(schedules(min_microbatches=1), st.data())
def test_no_rank_is_done_before_its_work_can_be(schedule: pe.Schedule, data: st.DataObject) -> None:
    """The bound: the earliest moment at which anything can reach a rank, and then all of its own work."""
    seconds = st.floats(0, 10)
    graph, m = schedule.graph, schedule.num_microbatches
    per_stage = st.lists(seconds, min_size=graph.num_stages, max_size=graph.num_stages)
    weights = data.draw(st.lists(st.floats(0.1, 5), min_size=m, max_size=m))
    costs = pe.Costs(*(data.draw(per_stage) for _ in range(3)), weights=weights)
    makespan = pe.simulate(schedule, costs).makespan
    for rank, program in enumerate(schedule.programs):
        first = min(graph.stages_of(rank))
        arrival = min(weights) * sum(costs._at(costs.forward, stage) for stage in range(first))
        assert makespan >= (arrival + sum(costs.of(action) for action in program)) * (1 - 1e-9)


@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(1, 3), st.integers(1, 40))
def test_interleaved_loses_little_when_microbatches_do_not_fill_its_rounds(p: int, v: int, m: int) -> None:
    graph = chain_for("interleaved", p, v)
    makespan = pe.simulate(pe.build("interleaved", graph, m), pe.Costs(1 / v, 1 / v, 1 / v)).makespan
    full = 3 * max(m, p) + 3 * (p - 1) / v
    assert makespan <= full + 3 * (m // p if m > p else 0) + 1e-9
