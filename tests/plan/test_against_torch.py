"""Another implementation: the action lists of torch.distributed.pipelining, where those are right.

Its 1F1B list counts the last rank's forwards from 1 and its warm-ups past m, so only m >= P and the other ranks are
compared; its breadth-first list takes backwards from the last microbatch to the first, so only forwards are.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

import pipeline_engine as pe
from pipeline_engine.plan.actions import Forward
from tests.strategies import chain_for

SIZES = [(ranks, m) for ranks in (1, 2, 3, 4, 6) for m in (1, 2, 3, 4, 5, 8, 12, 13)]


def as_torch_writes(lists: Any, graph: pe.StageGraph, name: str) -> pe.Schedule:
    """A schedule read from torch's own strings; it leaves idle slots as None."""
    rows = [[str(action) for action in lists[rank] if action is not None] for rank in range(graph.num_ranks)]
    kept = [[word for word in row if "REDUCE_GRAD" not in word] for row in rows]
    return pe.Schedule.from_csv("\n".join(",".join(row) for row in kept), graph, name)


def torch_list(kind: Callable[..., Any], graph: pe.StageGraph, m: int, **more: object) -> list[Any]:
    ranks = graph.num_ranks
    state = SimpleNamespace(
        pp_group_size=ranks,
        num_stages=graph.num_stages,
        _num_stages=graph.num_stages,
        n_local_stages=graph.num_stages // ranks,
        _stages=range(graph.num_stages // ranks),
        _n_microbatches=m,
        **more,
    )
    return [kind._calculate_single_rank_operations(state, rank) for rank in range(ranks)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("ranks", "m"), SIZES)
def test_zb_v_is_torchs(ranks: int, m: int) -> None:
    graph = chain_for("zb-v", ranks)
    theirs = torch_list(torch_schedules.ScheduleZBVZeroBubble, graph, m)
    assert pe.build("zb-v", graph, m) == as_torch_writes(theirs, graph, "zb-v")


@pytest.mark.parametrize(("ranks", "m"), [(ranks, m) for ranks, m in SIZES if m >= 2 * ranks])
def test_dualpipe_v_is_torchs_with_its_pairs_one_after_the_other(ranks: int, m: int) -> None:
    graph = chain_for("dualpipe-v", ranks)
    theirs = torch_list(torch_schedules.ScheduleDualPipeV, graph, m)
    assert pe.build("dualpipe-v", graph, m) == as_torch_writes(theirs, graph, "dualpipe-v")


@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "m"), [(ranks, m) for ranks, m in SIZES if m % max(1, m // ranks) == 0])
def test_interleaved_is_torchs_wherever_torch_takes_the_number_of_microbatches(ranks: int, m: int, each: int) -> None:
    graph = chain_for("interleaved", ranks, each)
    length = m // max(1, m // ranks)
    theirs = torch_list(torch_schedules.ScheduleInterleaved1F1B, graph, m, microbatches_per_round=length)
    assert pe.build("interleaved", graph, m) == as_torch_writes(theirs, graph, "interleaved")


@pytest.mark.parametrize(("ranks", "m"), SIZES)
def test_looped_bfs_has_torchs_forwards(ranks: int, m: int) -> None:
    graph = chain_for("looped-bfs", ranks)
    theirs = as_torch_writes(torch_list(torch_schedules.ScheduleLoopedBFS, graph, m), graph, "looped-bfs")
    for ours, others in zip(pe.build("looped-bfs", graph, m).programs, theirs.programs, strict=True):
        assert [a for a in ours if isinstance(a, Forward)] == [a for a in others if isinstance(a, Forward)]
        assert set(ours) == set(others)


@pytest.mark.parametrize(("ranks", "m"), SIZES)
def test_gpipe_is_torchs(ranks: int, m: int) -> None:
    graph = chain_for("gpipe", ranks)
    state = SimpleNamespace(_num_stages=ranks, _n_microbatches=m)
    theirs = torch_schedules.ScheduleGPipe._get_pipeline_order(state)  # type: ignore[arg-type]
    assert pe.build("gpipe", graph, m) == as_torch_writes(theirs, graph, "gpipe")


@pytest.mark.parametrize(("ranks", "m"), [(ranks, m) for ranks, m in SIZES if m >= ranks])
def test_1f1b_is_torchs_but_for_the_last_rank(ranks: int, m: int) -> None:
    graph = chain_for("1f1b", ranks)
    state = SimpleNamespace(_num_stages=ranks, _n_microbatches=m)
    theirs = as_torch_writes(torch_schedules.Schedule1F1B._get_pipeline_order(state), graph, "1f1b")  # type: ignore[arg-type]
    assert pe.build("1f1b", graph, m).programs[:-1] == theirs.programs[:-1]
