"""1F1B: after a short warm-up each forward is followed by one backward.

    rank 0   F0 F1 F2 B0 F3 B1 B2 B3
    rank 1   F0 F1 B0 F2 B1 F3 B2 B3
    rank 2   F0 B0 F1 B1 F2 B2 F3 B3

Bubble: (p - 1)(f + b) seconds per rank when m >= p.  Held on rank r: at most min(p - r, m) microbatches.
Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from pipeline_engine.plan.actions import Backward, Forward, Program


def one_forward_one_backward(num_stages: int, num_microbatches: int) -> tuple[Program, ...]:
    """Programs for a straight chain of ``num_stages`` stages, one a rank."""

    def program(stage: int) -> Program:
        forwards = [Forward(stage, m) for m in range(num_microbatches)]
        backwards = [Backward(stage, m) for m in range(num_microbatches)]
        warmup = min(num_stages - 1 - stage, num_microbatches)
        steady = num_microbatches - warmup
        pairs = zip(forwards[warmup:], backwards[:steady], strict=True)
        steady_state: Iterable[Forward | Backward] = chain.from_iterable(pairs)
        return (*forwards[:warmup], *steady_state, *backwards[steady:])

    return tuple(program(stage) for stage in range(num_stages))
