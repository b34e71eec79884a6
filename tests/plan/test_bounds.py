"""What one order costs at its longest path and its fullest moment, every other order pays too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.plan.bounds import Bound, Bounds
from pipeline_engine.plan.outline import Outline
from tests.strategies import schedules


def product(bound: Bound, weights: list[float]) -> float:
    return sum(rate * weight for rate, weight in zip(bound, weights, strict=False)) + bound[-1]


@given(schedules(min_microbatches=1), st.floats(0, 2), st.floats(0, 2), st.data())
def test_a_bound_is_what_its_own_order_costs_and_at_most_what_another_does(
    schedule: pe.Schedule, latency: float, loss: float, data: st.DataObject
) -> None:
    count = schedule.num_microbatches
    lists = st.lists(st.floats(0.1, 9.0), min_size=count, max_size=count)
    own, other = data.draw(lists), data.draw(lists)
    costs = pe.Costs(latency=latency, loss=loss, seconds_per_byte=0.1, num_bytes={"x": 3.0})
    outline = Outline.of(schedule, costs)
    path, moment = outline.longest_path(own, outline.ends(own)), outline.fullest_moment(own)
    assert product(path, own) == pytest.approx(outline.makespan(own))
    assert product(path, other) <= outline.makespan(other) * (1 + 1e-9)
    assert product(moment, own) == pytest.approx(outline.peak(own))
    assert product(moment, other) <= outline.peak(other) * (1 + 1e-9)


@given(schedules(min_microbatches=1), st.data())
def test_the_peak_of_every_order_lies_between_what_is_known_beforehand(
    schedule: pe.Schedule, data: st.DataObject
) -> None:
    count = schedule.num_microbatches
    weights = data.draw(st.lists(st.floats(0.1, 9.0), min_size=count, max_size=count))
    outline = Outline.of(schedule, pe.Costs())
    low, high = outline.peaks_of_any_order(weights)
    peak = outline.peak(data.draw(st.permutations(weights)))
    assert low * (1 - 1e-9) <= peak <= high * (1 + 1e-9)


def test_bounds_turn_away_what_any_of_them_is_over() -> None:
    bounds = Bounds()
    assert not bounds.exceed([9.0, 9.0], 0.0)
    bounds.add((1.0, 0.0, 0.5))
    bounds.add((0.0, 2.0, 0.0))
    assert bounds.exceed([3.0, 1.0], 3.4)
    assert bounds.exceed([1.0, 2.0], 3.4)
    assert not bounds.exceed([2.5, 1.5], 3.4)


def test_bounds_forget_what_turned_nothing_away_for_long() -> None:
    bounds = Bounds()
    bounds.add((1.0, 0.0))
    bounds.add((0.0, 1.0))
    assert bounds.exceed([2.0], 1.5)  # by the first, which moves to the front
    for _ in range(100):
        bounds.add((0.0, 0.0))
        assert bounds.exceed([2.0], 1.5)
    assert not bounds.exceed([0.0], 0.5)
