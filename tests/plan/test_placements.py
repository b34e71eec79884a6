"""Which graphs a schedule runs on: a demand is about ranks, and an order for a chain serves any graph placed alike."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.plan.actions import Forward
from tests.plan.graphs import graphs
from tests.strategies import chain_for


@given(graphs(), st.integers(0, 6))
def test_gpipe_runs_on_every_graph(graph: pe.StageGraph, m: int) -> None:
    pe.check(pe.build("gpipe", graph, m))


@pytest.mark.parametrize("name", pe.SCHEDULES)
@settings(max_examples=40)
@given(st.data(), st.integers(1, 4), st.integers(0, 9))
def test_every_schedule_runs_on_any_graph_placed_as_it_wants(name: str, data: st.DataObject, p: int, m: int) -> None:
    graph = data.draw(graphs(rank_of=chain_for(name, p).rank_of))
    pe.check(pe.build(name, graph, m))


@settings(max_examples=40)
@given(st.permutations(range(5)), st.integers(0, 9))
def test_one_stage_each_is_enough_for_1f1b_whatever_the_order_of_ranks(rank_of: list[int], m: int) -> None:
    graph = pe.StageGraph([(stage, stage + 1) for stage in range(4)], rank_of)
    for name in ("1f1b", "zb-h1"):
        pe.check(pe.build(name, graph, m))


def test_1f1b_warms_up_by_the_longest_way_to_the_end() -> None:
    """Two branches side by side: stages 1 and 2 both stand one hop from the last one."""
    diamond = pe.StageGraph([(0, 1), (0, 2), (1, 3), (2, 3)], [0, 1, 2, 3])
    programs = pe.build("1f1b", diamond, 8).programs
    leading = [next(i for i, a in enumerate(program) if not isinstance(a, Forward)) for program in programs]
    assert leading == [3, 2, 2, 1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("1f1b", r"schedule '1f1b' wants one stage on each rank, as .*placement='straight'.*; got rank_of \[0, 0, 1\]"),
        ("zb-h1", "wants one stage on each rank"),
        ("interleaved", "wants stage s on rank s mod P, as .*placement='looped'"),
        ("looped-bfs", "wants stage s on rank s mod P"),
        ("zb-v", "wants two stages a rank, down and up again, as .*placement='vee'"),
        ("dualpipe-v", "wants two stages a rank, down and up again"),
    ],
)
def test_a_refusal_says_what_the_schedule_wants_and_what_it_got(name: str, words: str) -> None:
    graph = pe.StageGraph([(0, 1), (1, 2)], [0, 0, 1])
    with pytest.raises(pe.ScheduleError, match=words):
        pe.build(name, graph, 4)
