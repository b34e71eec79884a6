"""The least time in which actions that took so long can follow each other: what no engine can beat."""

from __future__ import annotations

from collections.abc import Mapping

import pipeline_engine as pe
from pipeline_engine.plan.actions import Action, makes, needs
from pipeline_engine.plan.values import OutputGrad, Value


def bound(schedule: pe.Schedule, seconds: Mapping[Action, float]) -> float:
    """Makespan of the schedule if nothing but its computing actions took time.

    Args:
        schedule: computing verbs only.
        seconds: what each action took.
    """
    made: dict[Value, float] = {}
    clocks = [0.0 for _ in schedule.programs]
    places = [0 for _ in schedule.programs]
    while any(_advance(schedule, rank, places, clocks, made, seconds) for rank in range(len(places))):
        pass
    return max(clocks)


def _advance(
    schedule: pe.Schedule,
    rank: int,
    places: list[int],
    clocks: list[float],
    made: dict[Value, float],
    seconds: Mapping[Action, float],
) -> bool:
    """Perform what the rank can perform now; whether that was anything."""
    program, before = schedule.programs[rank], places[rank]
    while places[rank] < len(program):
        action = program[places[rank]]
        wanted = [value for value in needs(action, schedule.graph) if not isinstance(value, OutputGrad)]
        if any(value not in made for value in wanted):
            break
        clocks[rank] = max([clocks[rank], *(made[value] for value in wanted)]) + seconds[action]
        made |= dict.fromkeys(makes(action), clocks[rank])
        places[rank] += 1
    return places[rank] > before
