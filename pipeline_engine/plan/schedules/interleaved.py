"""Interleaved 1F1B: several stages on each rank, taken in rounds of about p microbatches.

    rank 0   0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    rank 1   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

Bubble: (p - 1)(f + b) / v seconds per rank when m is a multiple of p.
Held on rank r: at most (v - 1) p + 2 (p - r) - 1 activations of a stage when m is a multiple of p.
p ranks, v stages on each, m microbatches; f, b: forward and whole backward of one microbatch on one rank.
Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2, which wants m to be a multiple of p.  Here any m is cut
into m // p rounds of one length, and the last round is cut short; see Note [padding] in ``patterns``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline_engine.plan.actions import Backward, Compute, Forward
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.schedules.patterns import alternate


def interleaved(graph: StageGraph, num_microbatches: int, rank: int) -> Iterator[Compute]:
    """The program of one rank, which owns stages rank, rank + p, rank + 2p.."""
    ranks, stages = graph.num_ranks, graph.stages_of(rank)
    rounds = max(1, num_microbatches // ranks)
    length = -(-num_microbatches // rounds)
    forwards = (Forward(stage, m) for stage, m in _slots(stages, rounds, length))
    backwards = (Backward(stage, m) for stage, m in _slots(stages[::-1], rounds, length))
    warmup = (len(stages) - 1) * length + 2 * (ranks - 1 - rank)
    return (action for action in alternate(forwards, backwards, warmup) if action.microbatch < num_microbatches)


def _slots(stages: Sequence[int], rounds: int, length: int) -> Iterator[tuple[int, int]]:
    return ((stage, turn * length + place) for turn in range(rounds) for stage in stages for place in range(length))
