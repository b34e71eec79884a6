"""Perfetto: timelines as a trace for ui.perfetto.dev or chrome://tracing, with arrows for messages.

Each timeline is a process and each rank a thread; a counter shows the activations in flight.
Source: Trace Event Format, the types X, s, f, C and M.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline_engine.plan.actions import COMPUTE, Action, makes, needs
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.render.scene import Drawable, Scene, scene_of, timeline_for
from pipeline_engine.plan.simulate import Timeline
from pipeline_engine.plan.values import Value

_Event = dict[str, Any]
_MICROSECONDS = 1e6


def as_perfetto(panels: Mapping[str, Drawable] | Drawable, graph: StageGraph, order: Sequence[int] = ()) -> str:
    """Draw as a trace in JSON.

    Args:
        panels: what is drawn, by title; or one thing without a title.
        graph: the stage graph, which says what travels.
        order: for each place in the schedule the microbatch that stands there, to be shown instead.
    """
    named = panels if isinstance(panels, Mapping) else {"pipeline": panels}
    events: list[_Event] = []
    for process, (title, thing) in enumerate(named.items()):
        timeline = timeline_for(thing)
        events += _names(process, title, len(timeline.spans))
        events += _slices(process, scene_of(timeline, order))
        events += _arrows(process, timeline, graph)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(process: int, title: str, ranks: int) -> Iterator[_Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}}
    for rank in range(ranks):
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": {"name": f"rank {rank}"}}


def _slices(process: int, scene: Scene) -> Iterator[_Event]:
    for rank, blocks in enumerate(scene.blocks):
        for block in blocks:
            yield {
                "ph": "X",
                "name": block.name,
                "cat": block.kind,
                "pid": process,
                "tid": rank,
                "ts": block.start * _MICROSECONDS,
                "dur": (block.end - block.start) * _MICROSECONDS,
            }
    for rank, steps in enumerate(scene.held):
        for second, number in steps:
            name = f"in flight on rank {rank}"
            yield {"ph": "C", "name": name, "pid": process, "ts": second * _MICROSECONDS, "args": {"held": number}}


def _arrows(process: int, timeline: Timeline, graph: StageGraph) -> Iterator[_Event]:
    """From the end of what made a value to the start of what needs it on another rank."""
    made: dict[Value, tuple[int, float]] = {}
    takers: list[tuple[Action, int, float]] = []
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            if isinstance(span.action, COMPUTE):
                made.update(dict.fromkeys(makes(span.action), (rank, span.end)))
                takers.append((span.action, rank, span.start))
    number = 0
    for action, rank, start in takers:
        for value in needs(action, graph):
            source, end = made.get(value, (rank, start))
            if source != rank:
                number += 1
                yield from _arrow(str(value), process * 1_000_000 + number, process, (source, end), (rank, start))


def _arrow(
    name: str, number: int, process: int, source: tuple[int, float], target: tuple[int, float]
) -> Iterator[_Event]:
    common = {"name": name, "cat": "message", "id": number, "pid": process}
    # An arrow binds to the slice that encloses its end; so both ends stand just inside.
    yield {"ph": "s", **common, "tid": source[0], "ts": source[1] * _MICROSECONDS - 1e-3}
    yield {"ph": "f", "bp": "e", **common, "tid": target[0], "ts": target[1] * _MICROSECONDS + 1e-3}
