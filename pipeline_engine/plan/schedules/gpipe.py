"""GPipe: all forwards, then all backwards.

    rank 0   F0 F1 F2 F3 B0 B1 B2 B3
    rank 1   F0 F1 F2 F3 B0 B1 B2 B3
    rank 2   F0 F1 F2 F3 B0 B1 B2 B3

Bubble: (p - 1)(f + b) seconds per rank.  Held on every rank: m microbatches.
Source: Huang et al. 2019, arXiv:1811.06965, section 2.3.
"""

from __future__ import annotations

from pipeline_engine.plan.actions import Backward, Forward, Program


def gpipe(num_stages: int, num_microbatches: int) -> tuple[Program, ...]:
    """Programs for a straight chain of ``num_stages`` stages, one a rank."""

    def program(stage: int) -> Program:
        forwards = [Forward(stage, m) for m in range(num_microbatches)]
        backwards = [Backward(stage, m) for m in range(num_microbatches)]
        return (*forwards, *backwards)

    return tuple(program(stage) for stage in range(num_stages))
