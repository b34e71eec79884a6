"""Pace: what is measured becomes a line over tokens, and a window is cut where that pays."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")

import pipeline_engine as pe
from art_adapter.cutting import CutPlan
from art_adapter.pace import Agreed, Line, best_length

from .test_cutting import plan_of

CHAIN = pe.StageGraph.chain(4, 4)
ITEMS = CutPlan.of(plan_of([[first] + [99] * 63 for first in range(16)]))


def test_rows_of_several_lengths_tell_what_a_row_costs_beside_its_tokens() -> None:
    line = Line()
    assert line.fixed_and_rate == (0.0, 0.0)
    for _ in range(20):
        for tokens in (100, 400, 1000):
            line.add(tokens, 0.010 + 1e-4 * tokens)
    fixed, rate = line.fixed_and_rate
    assert fixed == pytest.approx(0.010, rel=0.2) and rate == pytest.approx(1e-4, rel=0.1)


def test_rows_of_one_length_are_held_to_cost_little_beside_their_tokens() -> None:
    line = Line()
    for _ in range(20):
        line.add(1000, 0.100)
    fixed, rate = line.fixed_and_rate
    assert 0.0 < fixed < 0.005 and rate == pytest.approx(1e-4, rel=0.05)


def agreed(seconds_per_token: float, fixed: float) -> Agreed:
    told = [[float(rank), fixed, seconds_per_token, 2 * fixed, 2 * seconds_per_token] for rank in range(4)]
    found = Agreed.of(told)
    assert found is not None
    return found


def pieces(known: Agreed | None, *, more: bool = False) -> int:
    length = best_length(ITEMS, known, CHAIN, more=more, differentiates=True)
    return sum(map(len, ITEMS.pieces(length)))


def test_before_anything_was_measured_a_window_is_left_whole() -> None:
    assert Agreed.of([[0.0, 0.0, 1e-3, 0.0, 2e-3], [1.0, 0.0, 0.0, 0.0, 0.0]]) is None
    assert pieces(None) == 1


def test_a_large_window_is_cut_so_that_the_pipeline_is_full_and_a_tiny_one_is_left_whole() -> None:
    assert pieces(agreed(1e-3, fixed=1e-4)) == 16
    assert pieces(agreed(1e-7, fixed=1e-4)) == 1
    assert 1 < pieces(agreed(1e-4, fixed=2e-3)) < 16


def test_the_ranks_of_one_stage_count_as_the_slowest_of_them() -> None:
    told = [[0.0, 0.0, 1e-3, 0.0, 4e-3], [0.0, 0.0, 3e-3, 0.0, 1e-3], [1.0, 0.0, 2e-3, 0.0, 2e-3]]
    found = Agreed.of(told)
    assert found is not None
    assert found.forward == pytest.approx((3e-3, 2e-3), rel=0.03)
    assert found.backward == pytest.approx((4e-3, 2e-3), rel=0.03)


def test_a_window_that_is_one_root_cannot_be_cut() -> None:
    whole = CutPlan.of(plan_of([[1, 2, 3], [1, 2, 4]]))
    assert best_length(whole, agreed(1.0, fixed=0.0), CHAIN, more=False, differentiates=True) == whole.tokens
