"""Census, law 1: every forward and backward exactly once, in range, on the rank that owns the stage."""

from __future__ import annotations

from attrs import define, field

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.actions import COMPUTE, Backward, BackwardInput, BackwardWeight, Compute, Forward
from pipeline_engine.plan.graph import StageGraph

_Counts = dict[type[Compute], list[bytearray]]


@define(eq=False)
class Census:
    """Counts actions as they come, one byte for each that can be; see ``add`` and ``finish``."""

    graph: StageGraph
    num_microbatches: int
    _counts: _Counts = field(init=False)

    def __attrs_post_init__(self) -> None:
        stages = range(self.graph.num_stages)
        self._counts = {verb: [bytearray(self.num_microbatches) for _ in stages] for verb in COMPUTE}

    def add(self, rank: int, step: int, action: Compute) -> None:
        """Count an action.

        Raises:
            ScheduleError: it is out of range, on a rank that does not own the stage, or counted already.
        """
        stage, m = action.stage, action.microbatch
        if stage >= self.graph.num_stages:
            raise ScheduleError(f"rank {rank} step {step}   {action}: stages run 0..{self.graph.num_stages - 1}.")
        if m >= self.num_microbatches:
            raise ScheduleError(f"rank {rank} step {step}   {action}: microbatches run 0..{self.num_microbatches - 1}.")
        if (owner := self.graph.rank_of[stage]) != rank:
            raise ScheduleError(f"rank {rank} step {step}   {action}: stage {stage} is owned by rank {owner}.")
        counts = self._counts[type(action)][stage]
        if counts[m]:
            raise ScheduleError(
                f"{action} is performed 2 times; every action is performed exactly once.  "
                f"The second is on rank {rank} step {step}."
            )
        counts[m] = 1

    def finish(self) -> None:
        """All actions were counted.

        Raises:
            ScheduleError: a forward is missing, or a backward is neither whole nor an input and a weight part.
        """
        has_backwards = any(any(counts) for verb in COMPUTE[1:] for counts in self._counts[verb])
        for stage in range(self.graph.num_stages):
            missing = self._counts[Forward][stage].find(0)
            if missing >= 0:
                raise ScheduleError(f"{Forward(stage, missing)} is missing; every forward is performed exactly once.")
            if has_backwards:
                self._check_backwards(stage)

    def _check_backwards(self, stage: int) -> None:
        whole, first, second = (self._counts[verb][stage] for verb in (Backward, BackwardInput, BackwardWeight))
        for m, counts in enumerate(zip(whole, first, second, strict=True)):
            if counts not in ((1, 0, 0), (0, 1, 1)):
                raise ScheduleError(
                    f"stage {stage}, microbatch {m}: {counts[0]} x B, {counts[1]} x I, {counts[2]} x W; "
                    "a backward is performed once, whole or as an I and a W."
                )
