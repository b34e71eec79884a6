"""A stage graph is numbered along its edges, and nobody can build one that is not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.graph import StageGraph


@pytest.mark.parametrize(
    ("edges", "rank_of", "words"),
    [
        ([(1, 0)], [0, 1], r"edge \(1, 0\): stages are numbered 0..1 along the graph"),
        ([(0, 0)], [0], r"edge \(0, 0\)"),
        ([(0, 2)], [0, 1], r"edge \(0, 2\)"),
        ([(-1, 1)], [0, 1], r"edge \(-1, 1\)"),
        ([(0, 1), (0, 1)], [0, 1], "each edge is named once"),
        ([(0, 2)], [0, 1, 2], "stage 1 has no stage before it"),
        ([(0, 1), (0, 2)], [0, 1, 2], "stage 1 has no stage after it"),
        ([(0, 1)], [0, 2], "rank 1 owns no stage"),
        ([(0, 1)], [0, -1], "rank -1 is negative"),
        ([], [], "rank_of is empty"),
    ],
)
def test_a_graph_that_is_none_is_refused(edges: Any, rank_of: Any, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        StageGraph(edges=edges, rank_of=rank_of)


@pytest.mark.parametrize(
    ("stages", "ranks", "placement", "words"),
    [
        (3, 2, "straight", "one stage on each rank: got 3 stages on 2 ranks"),
        (3, 2, "looped", "needs a multiple of 2 stages, got 3"),
        (6, 2, "vee", "4 for 2 ranks, got 6"),
        (0, 1, "straight", "at least one stage"),
        (1, 0, "straight", "at least one stage"),
        (2, 2, "spiral", "placement 'spiral' is unknown; one of"),
    ],
)
def test_numbers_that_do_not_fit_the_placement_are_refused(stages: int, ranks: int, placement: Any, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        StageGraph.chain(stages, ranks, placement)


def test_placements_lay_stages_out_as_they_are_called() -> None:
    assert StageGraph.chain(3, 3).rank_of == (0, 1, 2)
    assert StageGraph.chain(4, 2, "looped").rank_of == (0, 1, 0, 1)
    assert StageGraph.chain(4, 2, "vee").rank_of == (0, 1, 1, 0)


@given(st.integers(1, 8), st.sampled_from(["straight", "looped", "vee"]))
def test_a_chain_hangs_together(ranks: int, placement: Any) -> None:
    stages = ranks if placement == "straight" else 2 * ranks
    graph = StageGraph.chain(stages, ranks, placement)
    assert graph.is_chain and (graph.num_stages, graph.num_ranks) == (stages, ranks)
    assert graph.is_straight == (placement == "straight")
    assert [graph.before(stage) for stage in range(stages)] == [(), *((stage,) for stage in range(stages - 1))]
    assert [graph.after(stage) for stage in range(stages)] == [*((stage,) for stage in range(1, stages)), ()]
    assert sorted(stage for rank in range(ranks) for stage in graph.stages_of(rank)) == list(range(stages))


@given(st.integers(1, 8), st.sampled_from(["straight", "vee"]))
def test_an_output_reaches_every_rank_once_beginning_with_its_maker(ranks: int, placement: Any) -> None:
    graph = StageGraph.chain(ranks if placement == "straight" else 2 * ranks, ranks, placement)
    relay = graph.relay()
    assert relay[0] == graph.rank_of[graph.last_stage] and sorted(relay) == list(range(ranks))


def test_edges_in_any_order_make_the_same_graph() -> None:
    assert StageGraph([(0, 2), (1, 2), (0, 1)], [0, 1, 2]) == StageGraph([(0, 1), (0, 2), (1, 2)], (0, 1, 2))
