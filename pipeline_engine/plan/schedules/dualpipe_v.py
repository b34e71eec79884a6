"""DualPipeV: stages lie down and up again; forwards of one direction are paired with backwards of the other.

    rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
    rank 1   1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3

The paper overlaps a pair's forward with its backward; here the two run one after the other.  Backwards are split where
the paper splits them: on the way in, and in the second half of the way out.
Bubble: (p - 1) f / 2 seconds per rank when f = i = w and m >= 2p.
Held on every rank: at most 2p + 1 activations of a stage.
p ranks with two stages each, m microbatches; f, i, w: forward and the halves of a backward on one rank.
Source: DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1, and github.com/deepseek-ai/DualPipe, ``dualpipev.py``.  With
fewer than 2p microbatches: Note [padding] in ``patterns``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline_engine.plan.actions import Compute
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.schedules.patterns import spell


def dualpipe_v(graph: StageGraph, num_microbatches: int, rank: int) -> Iterator[Compute]:
    """The program of one rank, which owns a stage on the way down and one on the way up."""
    above, below = rank, graph.num_ranks - 1 - rank
    spare = max(0, num_microbatches - 2 * graph.num_ranks)
    late = ("iI" * (above + 1))[above + 1 :] + "I" * below  # inputs whose weights wait, oldest first
    weights = late.replace("i", "w").replace("I", "W")
    fill = "F" * (2 * below) + "Ff" * (above + 1) + "iwf" * below
    steady = "FbfB" * (spare + above + 1) + "bfB" * below
    whole, split = ("bB" * (above + 1))[: above + 1], late[: above + 1]
    drain = whole + split + "".join(weight + "I" for weight in weights[:below]) + weights[below:]
    return spell(fill + steady + drain, graph.stages_of(rank), num_microbatches)
