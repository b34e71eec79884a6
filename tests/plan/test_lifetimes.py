"""A value is freed after its last read: the number of reads is the number of readers in the lowered program."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.plan.actions import (
    Backward,
    BackwardInput,
    Forward,
    PostRecv,
    Publish,
    Send,
    WaitRecv,
    WaitSend,
    Yield,
)
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.lifetimes import reads_on
from pipeline_engine.plan.values import Activation, InputGrad, Output, OutputGrad, Value
from tests.strategies import schedules


@given(schedules(), st.booleans())
def test_a_value_is_read_as_often_as_its_lifetime_says(schedule: pe.Schedule, hand_out: bool) -> None:
    graph = schedule.graph
    for rank, program in enumerate(pe.lower(schedule, hand_out=hand_out).programs):
        made: Counter[Value] = Counter()
        read: Counter[Value] = Counter()
        for action in program:
            match action:
                case Forward(stage, m):
                    made[Activation(stage, m)] += 1
                    read.update(Activation(before, m) for before in graph.before(stage))
                case Backward(stage, m) | BackwardInput(stage, m):
                    made[InputGrad(stage, m)] += 1
                    read.update(InputGrad(after, m) for after in graph.after(stage))
                    read.update([OutputGrad(m)] if stage == graph.last_stage else [])
                case Publish(m):
                    made[Output(m)] += 1
                    read[Activation(graph.last_stage, m)] += 1
                case Yield(m):
                    read[Output(m)] += 1
                case Send(value, _):
                    read[value] += 1
                case WaitRecv(value, _):
                    made[value] += 1
                case PostRecv() | WaitSend():
                    pass
        assert set(made.values()) <= {1}
        for value in made:
            assert read[value] == reads_on(rank, graph, hand_out=hand_out).of(value), f"{value} on rank {rank}"


def test_a_value_that_skips_a_stage_is_read_by_both_its_takers() -> None:
    graph = StageGraph(edges=[(0, 1), (1, 2), (0, 2)], rank_of=[0, 1, 1])
    assert reads_on(0, graph).of(Activation(0, 0)) == 1  # sent once
    assert reads_on(1, graph).of(Activation(0, 0)) == 2  # by stages 1 and 2
    assert reads_on(1, graph).of(Activation(2, 0)) == 1  # published
    assert reads_on(1, graph).of(InputGrad(2, 0)) == 2  # by stage 1, and sent to stage 0
    assert reads_on(0, graph).of(InputGrad(0, 0)) == 0
    assert reads_on(1, graph).of(OutputGrad(0)) == 1
    assert [reads_on(rank, graph).of(Output(0)) for rank in (0, 1)] == [1, 2]
