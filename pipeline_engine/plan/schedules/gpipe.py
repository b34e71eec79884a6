"""GPipe: all forwards, then all backwards.

    rank 0   0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
    rank 1   1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3
    rank 2   2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3

Runs on every graph: a rank with several stages takes them one after the other, and back.
Bubble: (p - 1)(f + b) seconds per rank with one stage each.  Held on every rank: v m activations of a stage.
p ranks, v stages on each, m microbatches; f, b: forward and whole backward of one microbatch on one rank.
Source: Huang et al. 2019, arXiv:1811.06965, section 2.3.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline_engine.plan.actions import Backward, Compute, Forward
from pipeline_engine.plan.graph import StageGraph


def gpipe(graph: StageGraph, num_microbatches: int, rank: int) -> Iterator[Compute]:
    """The program of one rank."""
    stages, microbatches = graph.stages_of(rank), range(num_microbatches)
    yield from (Forward(stage, m) for stage in stages for m in microbatches)
    yield from (Backward(stage, m) for stage in reversed(stages) for m in microbatches)
