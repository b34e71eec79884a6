"""1F1B: after a short warm-up each forward is followed by one backward.

    rank 0   0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    rank 1   1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
    rank 2   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

The warm-up of a stage is its longest way to the last one; on a chain p - 1 - r.
Bubble: (p - 1)(f + b) seconds per rank.  Held on rank r: at most min(p - r, m) activations.
p ranks with one stage each, m microbatches; f, b: forward and whole backward of one microbatch on one rank.
Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline_engine.plan.actions import Backward, Compute, Forward
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.schedules.patterns import alternate


def one_forward_one_backward(graph: StageGraph, num_microbatches: int, rank: int) -> Iterator[Compute]:
    """The program of one rank, which owns one stage."""
    (stage,) = graph.stages_of(rank)
    forwards = (Forward(stage, m) for m in range(num_microbatches))
    backwards = (Backward(stage, m) for m in range(num_microbatches))
    return alternate(forwards, backwards, warmup=graph.hops_to_end()[stage])
