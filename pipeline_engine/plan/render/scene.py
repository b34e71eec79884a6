"""Scene: what every picture shows, before it is text, SVG or JSON.

A schedule is shown as it runs when forward and each half of a backward take a second and messages nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from pipeline_engine.plan.actions import COMPUTE, Backward, BackwardInput, BackwardWeight, Compute, Forward, Yield
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.simulate import Costs, Span, Timeline, simulate
from pipeline_engine.plan.trace import Trace

Drawable = Schedule | Timeline | Trace


@frozen
class Block:
    """One action to be drawn.

    Attributes:
        kind: ``"forward"``, ``"backward"``, ``"input"`` or ``"weight"`` (the halves of a backward), or ``"loss"``.
        label: the caller's number of the microbatch.
        layer: which of its rank's stages it is, counted from 0.
        name: what a reader is told who points at it.
    """

    kind: str
    label: str
    layer: int
    name: str
    start: float
    end: float


@frozen
class Scene:
    """Everything that a picture needs of one timeline.

    Attributes:
        blocks: for each rank its actions that take time, in order.
        held: for each rank its steps of activations in flight: (second, number from then on).
        makespan: seconds.
        layers: stages of the rank that has the most.
    """

    blocks: tuple[tuple[Block, ...], ...]
    held: tuple[tuple[tuple[float, int], ...], ...]
    makespan: float
    bubble: float
    layers: int

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that occur, in the order in which they are explained."""
        there = {block.kind for blocks in self.blocks for block in blocks}
        return tuple(kind for kind in KINDS if kind in there)

    @property
    def most_held(self) -> int:
        """The largest number in flight on any rank."""
        return max((number for steps in self.held for _, number in steps), default=0)


_KIND_OF = {
    Forward: "forward",
    Backward: "backward",
    BackwardInput: "input",
    BackwardWeight: "weight",
    Yield: "loss",
}
KINDS = tuple(_KIND_OF.values())


def scene_of(thing: Drawable, order: Sequence[int] = ()) -> Scene:
    """Prepare a picture.

    Args:
        thing: a schedule, a timeline or a trace.
        order: for each place in the schedule the microbatch that stands there; empty means the same number.
    """
    timeline = timeline_for(thing)
    owned = [
        sorted({span.action.stage for span in spans if isinstance(span.action, COMPUTE)}) for spans in timeline.spans
    ]
    return Scene(
        blocks=tuple(
            tuple(_block(span, stages, order) for span in spans if span.end > span.start)
            for spans, stages in zip(timeline.spans, owned, strict=True)
        ),
        held=tuple(tuple(timeline.in_flight(rank)) for rank in range(len(timeline.spans))),
        makespan=timeline.makespan,
        bubble=timeline.bubble,
        layers=max(map(len, owned), default=1),
    )


def timeline_for(thing: Drawable) -> Timeline:
    """The timeline of anything that can be drawn."""
    match thing:
        case Schedule():
            return simulate(thing, Costs())
        case Trace():
            return thing.timeline
        case Timeline():
            return thing


def _block(span: Span, stages: Sequence[int], order: Sequence[int]) -> Block:
    action = span.action
    assert isinstance(action, (*COMPUTE, Yield))
    label = str(order[action.microbatch] if order else action.microbatch)
    if isinstance(action, Yield):
        return Block("loss", label, 0, f"the caller's code for microbatch {label}", span.start, span.end)
    return _stage_block(action, label, stages.index(action.stage), span)


def _stage_block(action: Compute, label: str, layer: int, span: Span) -> Block:
    return Block(_KIND_OF[type(action)], label, layer, f"{action.stage}{action.letter}{label}", span.start, span.end)
