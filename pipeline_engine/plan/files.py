"""Files: schedules, timelines and traces as JSON and CSV, and back.

CSV has one program a row and one action a cell; JSON has everything.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from attrs import asdict

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.actions import COMPUTE, parse_action
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.simulate import Span, Timeline
from pipeline_engine.plan.timeline import Idle
from pipeline_engine.plan.trace import Trace

Writable = Schedule | Timeline | Trace


def as_csv(schedule: Schedule) -> str:
    """A schedule as CSV: one program a row, one action a cell, as ``Schedule.from_csv`` reads it.

    Args:
        schedule: computing verbs only, or lowered.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([str(action) for action in each] for each in schedule.programs)
    return text.getvalue()


def as_json(thing: Writable) -> str:
    """A schedule, a timeline or a trace as JSON, as ``from_json`` reads it.

    Args:
        thing: what to write down; all that compares equal is kept.
    """
    return json.dumps(_plain(thing))


def from_json(text: str) -> Writable:
    """Read back what ``as_json`` wrote.

    Args:
        text: JSON.

    Returns:
        what was written, equal to it.

    Raises:
        ScheduleError: it is no such text.
    """
    try:
        return _read(json.loads(text))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ScheduleError):
            raise
        raise ScheduleError(f"this is no JSON of a schedule, timeline or trace: {error!r}.") from None


def graph_of_csv(text: str) -> StageGraph:
    """The chain of stages that the rows of a CSV file perform, each on the rank whose row has it.

    Raises:
        ScheduleError: a cell is not an action, or some stage of the chain is performed on no rank.
    """
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(csv.reader(io.StringIO(text))):
        for action in (parse_action(cell.strip()) for cell in row if cell.strip()):
            if isinstance(action, COMPUTE):
                rank_of.setdefault(action.stage, rank)
    stages = range(max(rank_of, default=-1) + 1)
    if missing := [stage for stage in stages if stage not in rank_of]:
        raise ScheduleError(f"stage {missing[0]} is performed on no rank.")
    edges = [(stage, stage + 1) for stage in stages[:-1]]
    return StageGraph(edges=edges, rank_of=[rank_of[stage] for stage in stages])


def _plain(thing: Writable) -> dict[str, Any]:
    match thing:
        case Schedule(name=name, graph=graph, num_microbatches=count, programs=programs):
            return {
                "kind": "schedule",
                "name": name,
                "edges": graph.edges,
                "rank_of": graph.rank_of,
                "num_microbatches": count,
                "programs": [[str(action) for action in program] for program in programs],
            }
        case Timeline():
            return {
                "kind": "timeline",
                "spans": _plain_spans(thing.spans),
                "makespan": thing.makespan,
                "bubble": thing.bubble,
                "peak_in_flight": thing.peak_in_flight,
                "idle": [asdict(each) for each in thing.idle],
                "waited_for": [sorted(each.items()) for each in thing.waited_for],
            }
        case Trace():
            return {
                "kind": "trace",
                "schedule": _plain(thing.schedule),
                "weights": thing.weights,
                "spans": _plain_spans(thing.spans),
            }


def _plain_spans(ranks: Sequence[Sequence[Span]]) -> list[list[tuple[str, float, float]]]:
    return [[(str(span.action), span.start, span.end) for span in spans] for spans in ranks]


def _read(plain: dict[str, Any]) -> Writable:
    match plain["kind"]:
        case "schedule":
            return _read_schedule(plain)
        case "timeline":
            return Timeline(
                spans=tuple(map(tuple, _read_spans(plain["spans"]))),
                makespan=plain["makespan"],
                bubble=plain["bubble"],
                peak_in_flight=tuple(plain["peak_in_flight"]),
                idle=tuple(Idle(**each) for each in plain["idle"]),
                waited_for=tuple({step: (rank, place) for step, (rank, place) in each} for each in plain["waited_for"]),
            )
        case "trace":
            return Trace(_read_schedule(plain["schedule"]), plain["weights"], _read_spans(plain["spans"]))
        case kind:
            raise ScheduleError(f"kind is {kind!r}; one of 'schedule', 'timeline', 'trace'.")


def _read_schedule(plain: dict[str, Any]) -> Schedule:
    graph = StageGraph(edges=plain["edges"], rank_of=plain["rank_of"])
    programs = [[parse_action(word) for word in program] for program in plain["programs"]]
    return Schedule(plain["name"], graph, plain["num_microbatches"], programs)


def _read_spans(ranks: Any) -> list[list[Span]]:
    return [[Span(parse_action(action), float(start), float(end)) for action, start, end in spans] for spans in ranks]
