"""What the laws are tried on: schedules of the registry, sizes, and what a caller may do."""

from __future__ import annotations

from attrs import frozen
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.plan.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    PostRecv,
    Publish,
    Send,
    WaitRecv,
    WaitSend,
    Yield,
)
from pipeline_engine.plan.values import Activation, InputGrad, Output, OutputGrad, Value

schedule_names = st.sampled_from(sorted(pe.SCHEDULES))


def chain_for(name: str, ranks: int, stages_each: int = 2) -> pe.StageGraph:
    """A chain on which a schedule of the registry runs; ``stages_each`` counts where there is a choice."""
    placement = pe.SCHEDULES[name].placement
    each = {"straight": 1, "vee": 2}.get(placement, stages_each)
    return pe.StageGraph.chain(each * ranks, ranks, placement)


@st.composite
def schedules(
    draw: st.DrawFn, *, max_ranks: int = 8, min_microbatches: int = 0, max_microbatches: int = 19
) -> pe.Schedule:
    """A schedule of the registry; m goes up to 2P + 3."""
    name = draw(schedule_names)
    graph = chain_for(name, draw(st.integers(1, max_ranks)), draw(st.integers(1, 4)))
    return pe.build(name, graph, draw(st.integers(min_microbatches, min(2 * graph.num_ranks + 3, max_microbatches))))


# Values and actions.

_index = st.integers(0, 10**6)
travelling_values: st.SearchStrategy[Value] = st.one_of(
    st.builds(Activation, _index, _index), st.builds(InputGrad, _index, _index), st.builds(Output, _index)
)
values: st.SearchStrategy[Value] = travelling_values | st.builds(OutputGrad, _index)
actions: st.SearchStrategy[Action] = st.one_of(
    *(st.builds(verb, _index, _index) for verb in (Forward, Backward, BackwardInput, BackwardWeight)),
    *(st.builds(verb, travelling_values, _index) for verb in (Send, WaitSend, PostRecv, WaitRecv)),
    *(st.builds(verb, _index) for verb in (Publish, Yield)),
)

# Callers.


@frozen
class Ask:
    """The caller takes the next item."""

    microbatch: int


@frozen
class Give:
    """One backward call of the caller over the sum of these items' losses."""

    microbatches: tuple[int, ...]


@frozen
class Skip:
    """The caller says that he wants no gradient for an item."""

    microbatch: int


@frozen
class Finish:
    """The caller takes the end of the stream."""


Event = Ask | Give | Skip | Finish


@st.composite
def histories(draw: st.DrawFn, num_microbatches: int) -> tuple[Event, ...]:
    """What a caller may do with a stream: give late, several at once, in another order, or never; skip; leave early."""
    events: list[Event] = []
    open_items: list[int] = []
    taken = draw(st.one_of(st.just(num_microbatches), st.integers(0, num_microbatches)))
    for microbatch in range(taken):
        events.append(Ask(microbatch))
        open_items.append(microbatch)
        events += draw(_some_of(open_items))
    if taken == num_microbatches and draw(st.booleans()):
        events.append(Finish())
        events += draw(_some_of(open_items))
    return tuple(events)


@st.composite
def _some_of(draw: st.DrawFn, open_items: list[int]) -> list[Event]:
    events: list[Event] = []
    while open_items and draw(st.integers(0, 3)):
        if draw(st.integers(0, 7)) == 0:
            chosen = [draw(st.sampled_from(open_items))]
            events.append(Skip(*chosen))
        else:
            chosen = draw(st.lists(st.sampled_from(open_items), min_size=1, max_size=3, unique=True))
            events.append(Give(tuple(chosen)))
        for microbatch in chosen:
            open_items.remove(microbatch)
    return events


def one_by_one(num_microbatches: int) -> tuple[Event, ...]:
    """The plain caller: backward for each item before the next is taken."""
    pairs = [(Ask(microbatch), Give((microbatch,))) for microbatch in range(num_microbatches)]
    return (*(event for pair in pairs for event in pair), Finish())
