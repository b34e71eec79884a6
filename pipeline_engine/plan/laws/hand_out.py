"""Hand-out, law 7: each output is handed out once on every rank that outputs reach."""

from __future__ import annotations

from collections import Counter

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.actions import Send, Yield
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.values import Output


def outputs_travel(schedule: Schedule) -> bool:
    """Whether a lowered schedule brings outputs to other ranks than the last stage's."""
    return any(type(a) is Send and type(a.value) is Output for program in schedule.programs for a in program)


def check_hand_out(schedule: Schedule) -> None:
    """Law 7, first part: each output once on every rank that it reaches."""
    last = schedule.graph.rank_of[schedule.graph.last_stage]
    for rank in range(schedule.graph.num_ranks) if outputs_travel(schedule) else [last]:
        counts = Counter(action.microbatch for action in schedule.programs[rank] if type(action) is Yield)
        for m in range(schedule.num_microbatches):
            if counts[m] != 1:
                raise ScheduleError(
                    f"rank {rank} performs {Yield(m)} {counts[m]} times; an output is handed out once on every rank."
                )
