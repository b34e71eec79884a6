"""ZB-V: stages lie down and up again, and split backwards leave no bubble but that of the first forwards.

    rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    rank 1   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

Bubble: (p - 1) f / 2 seconds per rank when f = i = w and m >= 2p - 1.
Held on every rank: at most 2p activations of a stage.
p ranks with two stages each, m microbatches; f, i, w: forward and the halves of a backward on one rank.
Source: Qi et al. 2024, arXiv:2405.15362, section 5.  With m < 2p - 1: Note [padding] in ``patterns``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline_engine.plan.actions import Compute
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.schedules.patterns import spell


def zb_v(graph: StageGraph, num_microbatches: int, rank: int) -> Iterator[Compute]:
    """The program of one rank, which owns a stage on the way down and one on the way up."""
    above, below = rank, graph.num_ranks - 1 - rank
    spare = max(0, num_microbatches - 2 * graph.num_ranks + 1)
    fill = "F" * (2 * below + 1) + "fF" * above + "fiw" * (below + 1)
    steady = "FIWfiw" * (spare + above) + "IWfiw" * below
    drain = "Ii" * above + "IW" * (below + 1) + "w" * above + "W" * above
    return spell(fill + steady + drain, graph.stages_of(rank), num_microbatches)
