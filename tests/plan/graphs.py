"""Any graph that a schedule may meet."""

from __future__ import annotations

from hypothesis import strategies as st

import pipeline_engine as pe


@st.composite
def graphs(draw: st.DrawFn, rank_of: tuple[int, ...] | None = None) -> pe.StageGraph:
    """Any graph of up to eight stages: each has a stage before it, but the first, and one after it, but the last."""
    stages = len(rank_of) if rank_of else draw(st.integers(1, 8))
    edges = {(draw(st.integers(0, after - 1)), after) for after in range(1, stages)}
    edges |= {(before, draw(st.integers(before + 1, stages - 1))) for before in range(stages - 1)}
    if rank_of is None:
        ranks = draw(st.lists(st.integers(0, 3), min_size=stages, max_size=stages))
        numbered = {rank: number for number, rank in enumerate(dict.fromkeys(ranks))}
        rank_of = tuple(numbered[rank] for rank in ranks)
    return pe.StageGraph(edges=edges, rank_of=rank_of)
