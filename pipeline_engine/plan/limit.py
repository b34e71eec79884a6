"""Limit: the same schedule with another number of activations in flight.

    1f1b, 3 ranks, as it is              the same with 4 in flight
    rank 0   F0 F1 F2 B0 F3 B1 B2 B3     rank 0   F0 F1 F2 F3 B0 B1 B2 B3
    rank 1   F0 F1 B0 F2 B1 F3 B2 B3     rank 1   F0 F1 F2 B0 F3 B1 B2 B3
    rank 2   F0 B0 F1 B1 F2 B2 F3 B3     rank 2   F0 F1 B0 F2 B1 F3 B2 B3

A few more than the schedule needs hide latency and even out microbatches of different lengths; fewer save memory.
"""

from __future__ import annotations

from collections import deque

from attrs import evolve

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.actions import Action, Backward, BackwardWeight, Forward, Program
from pipeline_engine.plan.outline import can_end
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.simulate import peak_in_flight


def limit(schedule: Schedule, max_in_flight: int) -> Schedule:
    """Every forward as early as the number in flight allows, everything else in the order that it has.

    Args:
        schedule: computing verbs only.
        max_in_flight: activations of one stage and microbatch that the fullest rank holds at once, from forward to
            the end of the backward; the other ranks' numbers keep their proportion to it, rounded up.

    Returns:
        The same schedule if it holds that number already.

    Raises:
        ScheduleError: ``max_in_flight`` is less than 1, or the schedule is lowered, or its ranks would wait for each
            other for ever, as can be with several stages a rank or split backwards; then the message has the least
            larger number that is lawful.
    """
    if max_in_flight < 1:
        raise ScheduleError(f"max_in_flight is {max_in_flight}; it is 1 or more.")
    if schedule.is_lowered:
        raise ScheduleError(f"schedule {schedule.name!r} is lowered already; limit it before.")
    limited = refitted(schedule, max_in_flight)
    if limited is not schedule and not can_end(limited):
        larger = range(max_in_flight + 1, max(map(len, schedule.programs)) + 1)
        own = max(map(peak_in_flight, schedule.programs))
        lawful = next((number for number in larger if can_end(refitted(schedule, number))), own)
        raise ScheduleError(
            f"with max_in_flight={max_in_flight} the ranks of schedule {schedule.name!r} would wait for each other for "
            f"ever; {lawful} is lawful."
        )
    return limited


def refitted(schedule: Schedule, max_in_flight: int) -> Schedule:
    """The same as ``limit``, but whether the ranks can go through is for the caller to find out."""
    peaks = [peak_in_flight(program) for program in schedule.programs]
    most = max(peaks)
    number = min(max_in_flight, max(_num_forwards(program) for program in schedule.programs))
    if number == most or most == 0:
        return schedule
    programs = [
        _merged(program, -(-peak * number // most)) for program, peak in zip(schedule.programs, peaks, strict=True)
    ]
    return evolve(schedule, programs=programs)


def _num_forwards(program: Program) -> int:
    return sum(isinstance(action, Forward) for action in program)


def _merged(program: Program, allowed: int) -> Program:
    forwards = deque(action for action in program if isinstance(action, Forward))
    others = deque(action for action in program if not isinstance(action, Forward))
    merged: list[Action] = []
    held = 0
    while forwards or others:
        if forwards and (held < allowed or not others):
            merged.append(forwards.popleft())
            held += 1
        else:
            merged.append(others.popleft())
            held -= isinstance(merged[-1], (Backward, BackwardWeight))
    return tuple(merged)
