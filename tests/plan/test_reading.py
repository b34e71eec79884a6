"""A user's own schedule: from text, a table, torch's strings or a function; and what is wrong with it, and where."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeline_engine as pe
from pipeline_engine.plan.actions import Action, Backward, Forward, parse_action
from pipeline_engine.plan.reading import read_actions
from tests.strategies import schedules

PAIR = pe.StageGraph.chain(2, 2)


def refused(table: str, graph: pe.StageGraph = PAIR) -> str:
    with pytest.raises(pe.ScheduleError) as caught:
        pe.Schedule.from_csv(table, graph)
    return str(caught.value)


@given(schedules(min_microbatches=1), st.booleans())
def test_a_schedule_is_read_back_from_its_table(schedule: pe.Schedule, lowered: bool) -> None:
    schedule = pe.lower(schedule) if lowered else schedule
    assert pe.Schedule.from_csv(pe.as_csv(schedule), schedule.graph, schedule.name) == schedule


def test_a_pair_that_torch_overlaps_is_read_one_after_the_other() -> None:
    assert read_actions("(0F1;3B0)OVERLAP_F_B") == [Forward(0, 1), Backward(3, 0)]
    assert read_actions("2I7") == [parse_action("2I7")] and read_actions("2W7") == [parse_action("2W7")]


@pytest.mark.parametrize(
    ("word", "cure"),
    [
        ("1UNSHARD", "parameters are the stage's own affair; leave it out"),
        ("1RESHARD", "parameters are the stage's own affair; leave it out"),
        ("1REDUCE_GRAD", "gradients are reduced after the call, by the caller; leave it out"),
        ("0SEND_F1", "messages are put in by lower(); leave it out"),
        ("1RECV_B1", "messages are put in by lower(); leave it out"),
    ],
)
def test_what_torch_writes_about_parameters_and_messages_is_refused_with_the_reason(word: str, cure: str) -> None:
    kind = word.strip("01")
    assert refused(f"0F0,0B0\n1F0,{word},1B0") == f"rank 1 step 1: '{word}' is torch's {kind}: {cure}."


@pytest.mark.parametrize("word", ["1X0", "1F0junk", "(0F1;3B0)", "(0F1;junk)OVERLAP_F_B", "0F-1", "F0", "1UNSHARDED"])
def test_an_unknown_verb_is_named_with_its_place_and_what_was_expected(word: str) -> None:
    message = refused(f"0F0,0B0\n1F0,,{word}")
    assert message.startswith("rank 1 step 1: ") and "is not a" in message and "expected for example 2F0" in message


def test_a_row_too_many_is_a_rank_that_owns_no_stage() -> None:
    assert refused("0F0,0B0\n1F0,1B0\n2F0") == (
        "schedule 'from csv' has 3 programs for 2 ranks; each rank has exactly one.  "
        "Rank 2 owns no stage: leave its program out, or give it a stage in rank_of."
    )


def test_a_function_is_asked_for_each_ranks_actions() -> None:
    def both(rank: int) -> list[Action]:
        return [verb(rank, m) for verb in (Forward, Backward) for m in range(3)]

    assert pe.Schedule.from_function("gpipe", PAIR, 3, both) == pe.build("gpipe", PAIR, 3)


@pytest.mark.parametrize("nonsense", ["0F0", None, 7, Forward])
def test_a_function_that_returns_something_else_is_refused_with_the_place(nonsense: Any) -> None:
    with pytest.raises(pe.ScheduleError, match=r"rank 0 step 1: .* is not an action; return for example Forward"):
        pe.Schedule.from_function("odd", PAIR, 1, lambda rank: [Forward(rank, 0), nonsense])


def test_a_circle_of_stages_is_named_and_a_wrong_numbering_is_not_called_one() -> None:
    with pytest.raises(pe.ScheduleError, match=r"edge \(2, 0\).*the stages 1 -> 2 -> 0 -> 1 form a cycle"):
        pe.StageGraph([(0, 1), (1, 2), (2, 0)], [0, 1, 2])
    with pytest.raises(pe.ScheduleError, match=r"edge \(2, 1\).*number the stages in the order in which data flows"):
        pe.StageGraph([(0, 2), (2, 1)], [0, 1, 2])
