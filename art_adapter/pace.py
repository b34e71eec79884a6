"""How long forwards and backwards take, measured as they run, and into how many microbatches a window is best cut.

Every rank measures its own stages; what is decided from the figures must be decided alike, so ranks exchange them
(``Pace.words``) and all use the same ``Agreed``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import attrs
import torch

import pipeline_engine as pe
from pipeline_engine.plan.actions import BACKWARD, Action, Forward
from pipeline_engine.run.tracing import Clock, CudaClock, HostClock, Recording

from .cutting import CutPlan

SECONDS_OF_AN_ACTION = 0.4e-3
"""What the engine itself takes for an action; measured, see benchmarks/overhead.md."""
SECONDS_OF_A_MESSAGE = 0.5e-3
"""From a send to its arrival; measured between two processes that wait for nothing else."""
SECONDS_WITHOUT_TOKENS = 2e-3
"""What a forward or backward is held to take however short its row, until rows of several lengths were measured."""
FORGETTING = 0.9
"""How much an older measurement counts against the next one."""
MOST_PIECES = 64


@attrs.define(eq=False)
class Line:
    """Seconds as a line over tokens, ``fixed + rate * tokens``: least squares that slowly forget.

    Before anything was measured there is one point, at no tokens.
    """

    _sums: list[float] = attrs.field(init=False, factory=lambda: [0.0] * 5)  # of 1, x, xx, y, xy

    def add(self, tokens: float, seconds: float) -> None:
        """One measurement."""
        new = (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
        self._sums = [FORGETTING * old + each for old, each in zip(self._sums, new, strict=True)]

    @property
    def fixed_and_rate(self) -> tuple[float, float]:
        """Seconds, and seconds per token; neither is negative. (0, 0) before the first measurement."""
        n, x, xx, y, xy = self._sums
        if not n:
            return 0.0, 0.0
        n, y = n + 1, y + SECONDS_WITHOUT_TOKENS
        spread = n * xx - x * x
        rate = max(0.0, (n * xy - x * y) / spread) if spread > 0 else 0.0
        fixed = (y - rate * x) / n
        return (fixed, rate) if fixed >= 0 else (0.0, xy / xx)


@attrs.frozen
class Agreed:
    """What all ranks of a pipeline know alike: seconds of each stage, by tokens.

    Attributes:
        forward, backward: seconds per token of each rank's stages together.
        fixed: what a row costs beside that, as the tokens that would take as long.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    fixed: float

    @classmethod
    def of(cls, words: Sequence[Sequence[float]]) -> Agreed | None:
        """From what every rank said, see ``Pace.words``; None while some stage has not measured forwards."""
        slowest: dict[int, list[float]] = {}
        for rank, *figures in words:
            slowest[int(rank)] = list(map(max, figures, slowest.get(int(rank), figures)))
        stages = [slowest[rank] for rank in sorted(slowest)]
        if any(not stage[1] for stage in stages):
            return None
        fixed = sum(stage[0] + stage[2] + 2 * SECONDS_OF_AN_ACTION for stage in stages)
        return cls(
            forward=tuple(_round(stage[1]) for stage in stages),
            backward=tuple(_round(stage[3]) for stage in stages),
            fixed=_round(fixed / sum(stage[1] + stage[3] for stage in stages)),
        )


class Pace(pe.Tracer):
    """This rank's measurements; a pipeline takes it as its tracer.

    Args:
        rank: in the pipeline.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self.forward, self.backward = Line(), Line()
        self._marks: deque[tuple[Line, float, Clock, Any, Any]] = deque(maxlen=256)

    def begin(self, schedule: pe.Schedule, microbatches: Any) -> Recording:
        """A call begins; nothing of it is kept but what its actions took."""
        clock = CudaClock() if torch.cuda.is_initialized() else HostClock()  # type: ignore[no-untyped-call]
        return _Measuring(schedule, microbatches, clock, pace=self)

    def note(self, action: Action, tokens: float, clock: Clock, start: Any, end: Any) -> None:
        """One action was performed between two marks of the clock."""
        line = self.forward if isinstance(action, Forward) else self.backward
        self._marks.append((line, tokens, clock, start, end))

    def words(self) -> list[float]:
        """The rank; fixed seconds and seconds per token of forwards, and the same of backwards."""
        while self._marks:
            line, tokens, clock, start, end = self._marks.popleft()
            line.add(tokens, clock.seconds(end) - clock.seconds(start))
        return [float(self._rank), *self.forward.fixed_and_rate, *self.backward.fixed_and_rate]


@attrs.define(eq=False)
class _Measuring(Recording):
    pace: Pace = attrs.field(kw_only=True)
    weights: dict[int, float] = attrs.field(init=False, factory=dict)

    def around(self, perform: Callable[[Action], None]) -> Callable[[Action], None]:
        """The same function; forwards and backwards are measured."""

        def measured(action: Action) -> None:
            if not isinstance(action, (Forward, *BACKWARD)):
                return perform(action)
            if isinstance(action, Forward):
                self.weights[action.microbatch] = self.microbatches[action.microbatch].weight
            start = self.clock.mark()
            perform(action)
            self.pace.note(action, self.weights[action.microbatch], self.clock, start, self.clock.mark())
            return None

        return measured


def best_length(
    whole: CutPlan, agreed: Agreed | None, graph: pe.StageGraph, *, more: bool, differentiates: bool
) -> int:
    """Tokens that a microbatch of a window had best have; the window's own length to leave it whole.

    Args:
        whole: the window's plan.
        agreed: None if nothing is known yet: then the window is left whole, and measured.
        graph: the stage graph.
        more: whether further windows will run in the same call, so that the pipeline does not run empty after this.
        differentiates: whether backwards will follow.
    """
    most = min(MOST_PIECES, sum(map(len, whole.roots)))
    if agreed is None or most <= len(whole.roots):
        return max(1, whole.tokens)
    best, least = whole.tokens, math.inf
    for number in sorted({*(2**power for power in range(most.bit_length())), most}):
        length = -(-whole.tokens // number)
        seconds = _seconds(_weights(whole, length, agreed), agreed, graph, more, differentiates)
        if seconds >= least:  # from here on pieces cost more than they save
            break
        best, least = length, seconds
    return best


def _weights(whole: CutPlan, tokens: int, agreed: Agreed) -> tuple[float, ...]:
    pieces = (piece for group in whole.pieces(tokens) for piece in group)
    return tuple(_round(sum(root.tokens for root in piece) + agreed.fixed) for piece in pieces)


@lru_cache(maxsize=1024)
def _seconds(
    weights: tuple[float, ...], agreed: Agreed, graph: pe.StageGraph, more: bool, differentiates: bool
) -> float:
    """Expected makespan of one window, or of three such windows in a row."""
    waves = 3 if more else 1
    share = graph.num_stages // graph.num_ranks
    half = [agreed.backward[rank] / 2 / share if differentiates else 0.0 for rank in graph.rank_of]
    costs = pe.Costs(
        forward=[agreed.forward[rank] / share for rank in graph.rank_of],
        backward_input=half,
        backward_weight=half,
        latency=SECONDS_OF_A_MESSAGE,
        weights=weights * waves,
    )
    return pe.simulate(pe.in_waves("gpipe", graph, [len(weights)] * waves), costs).makespan


def _round(value: float) -> float:
    """To about three per cent, so that what was worked out for a window serves for others like it."""
    return 0.0 if value <= 0 else math.exp(round(math.log(value) * 32) / 32)
