"""Check: the laws of a schedule, each with a counter-example that a person can read.

 1. Every forward and every backward (or input and weight pair) of every stage and microbatch exactly once, in range,
    on the rank that owns the stage.
 2. What an action needs is made before it, on its rank or received there.
 3. No deadlock under rendezvous: a send completes only when its receive is posted.
 4. On each channel the order of the sends equals the order of the receives.
 5. What is sent is waited for, what is posted is received, each exactly once; a value is freed once, after its last
    use.
 6. What is drawn, checked, simulated and run is one object: what runs is the lowered schedule that is checked here.
 7. With every gate from k on closed every rank still reaches its yield of k; yields come in one order on all ranks.
 8. At a yield no receive is outstanding whose send depends on what this rank does later.

Each check takes time in proportion to the number of actions.
"""

from __future__ import annotations

from pipeline_engine.plan.actions import COMPUTE
from pipeline_engine.plan.advance import lower
from pipeline_engine.plan.collector import without_collector
from pipeline_engine.plan.laws.census import Census
from pipeline_engine.plan.laws.dataflow import check_computing as check_computing
from pipeline_engine.plan.laws.hand_out import check_hand_out
from pipeline_engine.plan.laws.messages import check_order, check_pairs
from pipeline_engine.plan.laws.rendezvous import check_rendezvous
from pipeline_engine.plan.schedule import Schedule


@without_collector
def check(schedule: Schedule, *, tells_channels_apart: bool = True) -> None:
    """Hold a schedule to the laws; the computing verbs as given, and the lowered program that really runs.

    Args:
        schedule: computing verbs only, or lowered.
        tells_channels_apart: whether the transport does, as gloo by tags or by a group for each channel.  Otherwise
            the whole traffic of an ordered pair of ranks must have one order on both ends.

    Raises:
        ScheduleError: a law is broken; the message is a short counter-example in actions and ranks.
    """
    if schedule.is_lowered:
        _count(schedule)
    else:
        check_computing(schedule.name, schedule.graph, schedule.num_microbatches, schedule.programs)  # type: ignore[arg-type]
    lowered = lower(schedule)
    check_hand_out(lowered)
    check_pairs(lowered)
    check_order(lowered, tells_channels_apart=tells_channels_apart)
    check_rendezvous(lowered)


def _count(schedule: Schedule) -> None:
    census = Census(schedule.graph, schedule.num_microbatches)
    for rank, program in enumerate(schedule.programs):
        for step, action in enumerate(program):
            if isinstance(action, COMPUTE):
                census.add(rank, step, action)
    census.finish()
