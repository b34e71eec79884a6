"""Looped breadth-first: all microbatches go through a rank's first stage, then through its second, and back.

    rank 0   0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
    rank 1   1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2

It is GPipe on stages that lie in loops, which makes its bubble as small as that of ``interleaved``.
Bubble: (p - 1)(f + b) / v seconds per rank when m >= p.  Held on every rank: v m activations of a stage.
p ranks, v stages on each, m microbatches; f, b: forward and whole backward of one microbatch on one rank.
Source: Lamy-Poirier 2022, arXiv:2211.05953, section 3.  torch's ScheduleLoopedBFS takes the microbatches of a backward
from the last to the first; here they go in the order in which a caller gives their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline_engine.plan.actions import Compute
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.schedules.gpipe import gpipe


def looped_bfs(graph: StageGraph, num_microbatches: int, rank: int) -> Iterator[Compute]:
    """The program of one rank, which owns stages rank, rank + p, rank + 2p.."""
    return gpipe(graph, num_microbatches, rank)
