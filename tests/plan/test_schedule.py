"""A schedule is data: it goes to text and back, and a wrong word is named with its place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeline_engine as pe
from tests.strategies import schedules

PAIR = pe.StageGraph.chain(2, 2)
TEXT = """
0F0 0F1 0B0 0B1
1F0 1B0 1F1 1B1
"""


@given(schedules(min_microbatches=1), st.booleans())
def test_a_schedule_is_read_back_from_its_text(schedule: pe.Schedule, lowered: bool) -> None:
    schedule = pe.lower(schedule) if lowered else schedule
    assert pe.Schedule.from_text(schedule.to_text(), schedule.graph, schedule.name) == schedule


def test_a_schedule_written_by_hand_is_the_one_of_the_registry() -> None:
    assert pe.Schedule.from_text(TEXT, PAIR, "1f1b") == pe.build("1f1b", PAIR, 2)


def test_an_empty_cell_of_a_table_is_an_idle_slot() -> None:
    table = "0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1, 1B1,\n"
    assert pe.Schedule.from_csv(table, PAIR, "1f1b") == pe.build("1f1b", PAIR, 2)


def test_a_wrong_word_is_named_with_its_rank_and_step() -> None:
    with pytest.raises(pe.ScheduleError, match="rank 1 step 2: '1F1junk' is not an action"):
        pe.Schedule.from_text(TEXT.replace("1F1", "1F1junk"), PAIR)


def test_each_rank_has_exactly_one_program() -> None:
    with pytest.raises(pe.ScheduleError, match="'lonely' has 1 programs for 2 ranks"):
        pe.Schedule("lonely", PAIR, 1, [[]])
    with pytest.raises(pe.ScheduleError, match="num_microbatches is -1"):
        pe.Schedule("negative", PAIR, -1, [[], []])


@given(schedules(min_microbatches=1))
def test_a_lowered_schedule_knows_that_it_is_and_is_lowered_once(schedule: pe.Schedule) -> None:
    lowered = pe.lower(schedule)
    assert lowered.is_lowered and not schedule.is_lowered
    assert pe.lower(lowered) is lowered
