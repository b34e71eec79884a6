"""Cutting layers into stages."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeline_engine as pe


def cheapest(costs: list[float], stages: int) -> float:
    """The cost of the dearest stage in the best of all cuts, tried one by one."""
    ways = combinations(range(1, len(costs)), stages - 1)
    return min(
        max(sum(costs[start:end]) for start, end in zip((0, *way), (*way, len(costs)), strict=True)) for way in ways
    )


@given(st.data())
def test_no_other_cut_has_a_cheaper_dearest_stage(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9))
    stages = data.draw(st.integers(1, len(costs)))
    cut = pe.split(range(len(costs)), stages, costs)
    assert [layer for stage in cut for layer in stage] == list(range(len(costs)))
    assert len(cut) == stages and all(cut)
    assert max(sum(costs[layer] for layer in stage) for stage in cut) == cheapest(costs, stages)


@given(st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=12), st.integers(1, 12))
def test_costs_need_not_be_whole_numbers(costs: list[float], stages: int) -> None:
    stages = min(stages, len(costs))
    cut = pe.split(range(len(costs)), stages, costs)
    dearest = max(sum(costs[layer] for layer in stage) for stage in cut)
    assert dearest <= cheapest(costs, stages) * (1 + 1e-9) and len(cut) == stages and all(cut)


def test_an_embedding_and_a_head_count_as_what_they_cost() -> None:
    layers = ["embedding", *(f"layer {number}" for number in range(6)), "head"]
    costs = {"embedding": 0.1, "head": 2.0}
    cut = pe.split(layers, 3, lambda layer: costs.get(layer, 1.0))
    assert [len(stage) for stage in cut] == [3, 3, 2] or [len(stage) for stage in cut] == [4, 2, 2]
    assert cut[-1][-1] == "head"


def test_equal_layers_are_spread_evenly() -> None:
    assert sorted(len(stage) for stage in pe.split(range(10), 4)) in ([2, 2, 3, 3], [1, 3, 3, 3])


@pytest.mark.parametrize(
    "arguments, words",
    [
        (([1, 2], 3), "2 layers cannot be cut into 3 stages"),
        (([1, 2], 0), "2 layers cannot be cut into 0 stages"),
        (([], 1), "0 layers cannot be cut into 1 stages"),
        (([1, 2], 1, [1.0]), "1 costs are given for 2 layers"),
        (([1, 2], 1, [1.0, -1.0]), "the cost of layer 1 is -1.0"),
        (([1, 2], 1, [float("nan"), 1.0]), "the cost of layer 0 is nan"),
    ],
)
def test_what_cannot_be_cut_is_refused(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(pe.ScheduleError, match=words):
        pe.split(*arguments)  # type: ignore[arg-type]
