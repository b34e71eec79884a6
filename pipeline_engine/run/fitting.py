"""Fitting: before a tensor moves, the parts of a pipeline are held against each other."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from pipeline_engine.errors import UsageError
from pipeline_engine.plan.check import check
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.limit import limit
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.schedules import build
from pipeline_engine.run.stage import StageFunction
from pipeline_engine.run.transports.base import Transport


def check_kinds(transport: object, deadline: object) -> None:
    """Raise UsageError unless there is a transport to tell other ranks of further mistakes, and a time to wait."""
    if not isinstance(transport, Transport):
        raise UsageError(f"transport is {transport!r}; pass for example pe.TorchTransport(process_group).")
    if not isinstance(deadline, (int, float)) or not deadline > 0:
        raise UsageError(f"deadline is {deadline!r}; it is a number of seconds, more than 0.")


def check_fit(stages: Mapping[int, StageFunction], graph: StageGraph, transport: Transport) -> None:
    """Raise UsageError unless the stages are those of this rank, and the transport joins as many ranks as the graph."""
    if not isinstance(stages, Mapping):
        raise UsageError(f"stages is a {type(stages).__name__}; name this rank's stages by number: {{0: stage}}.")
    for number, stage in stages.items():
        if not callable(stage):
            raise UsageError(f"stage {number} is a {type(stage).__name__}, which cannot be called.")
    if transport.num_ranks != graph.num_ranks:
        raise UsageError(
            f"the graph is for {graph.num_ranks} ranks, the transport joins {transport.num_ranks}; "
            "the numbers must be equal."
        )
    expected = graph.stages_of(transport.rank)
    if tuple(sorted(stages)) != expected:
        raise UsageError(
            f"rank {transport.rank} owns stages {list(expected)} of the graph, but was given {sorted(stages)}."
        )


def fitting_schedule(schedule: str | Schedule, graph: StageGraph, count: int, max_in_flight: int | None) -> Schedule:
    """The schedule for ``count`` microbatches, held to the laws.

    Raises:
        UsageError: it is lowered, or for another graph or number of microbatches.
        ScheduleError: it breaks a law, or the name is unknown.
    """
    built = schedule if isinstance(schedule, Schedule) else build(schedule, graph, count)
    if built.is_lowered:
        raise UsageError(
            f"schedule {built.name!r} is lowered; the engine does that itself, for what the caller does: "
            "pass the schedule as it was before."
        )
    if built.graph != graph:
        raise UsageError(f"schedule {built.name!r} was made for another graph than the pipeline's.")
    if built.num_microbatches != count:
        raise UsageError(f"schedule {built.name!r} is for {built.num_microbatches} microbatches, not for {count}.")
    if max_in_flight is not None:
        built = limit(built, max_in_flight)
    check(built)
    return built


def digest_of(schedule: Schedule) -> str:
    """A checksum of all programs, to be compared between ranks."""
    return f"{zlib.crc32(repr([list(map(str, program)) for program in schedule.programs]).encode()):08x}"
