"""ZB-H1: 1F1B whose backwards are split, so that weight gradients fill the bubble at no more memory.

    rank 0   0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1   1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

Rank r puts its weight gradients off by r microbatches, as long as there are forwards.
Bubble: (p - 1)(f + i - w) seconds per rank when f = i = w and m >= p.
Held on rank r: at most min(p, m) activations.
p ranks with one stage each, m microbatches; f, i, w: forward and the halves of a backward on one rank.
Source: Qi et al. 2023, arXiv:2401.10241, section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from pipeline_engine.plan.actions import BackwardInput, BackwardWeight, Compute, Forward
from pipeline_engine.plan.graph import StageGraph


def zb_h1(graph: StageGraph, num_microbatches: int, rank: int) -> Iterator[Compute]:
    """The program of one rank, which owns one stage."""
    (stage,) = graph.stages_of(rank)
    warmup = graph.hops_to_end()[stage]
    delay = graph.num_stages - 1 - warmup
    forwards = (Forward(stage, m) for m in range(num_microbatches))
    weights = (BackwardWeight(stage, m) for m in range(num_microbatches))
    yield from islice(forwards, warmup)
    for m in range(num_microbatches):
        yield from islice(forwards, 1)
        yield BackwardInput(stage, m)
        if m >= delay or m + warmup >= num_microbatches:
            yield from islice(weights, 1)
    yield from weights
