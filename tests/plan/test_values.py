"""Values have one name each, and messages travel on the channel that the name says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.values import (
    Activation,
    Channel,
    InputGrad,
    Output,
    OutputGrad,
    Value,
    channel_of,
    continued,
    parse_value,
)
from tests.strategies import travelling_values, values


def test_a_value_is_written_as_in_a_formula() -> None:
    written = [str(value) for value in (Activation(1, 2), InputGrad(1, 2), Output(2), OutputGrad(2))]
    assert written == ["x[1,2]", "dx[1,2]", "y[2]", "dy[2]"]


@given(values)
def test_a_value_is_read_back_from_its_text(value: Value) -> None:
    assert parse_value(str(value)) == value


@given(values, st.text(min_size=1, max_size=3))
def test_text_around_a_value_is_refused(value: Value, junk: str) -> None:
    for text in (f"{junk}{value}", f"{value}{junk}"):
        if text == f"d{value}":  # that is another value
            continue
        with pytest.raises(ScheduleError, match="is not a value"):
            parse_value(text)


@given(st.text(alphabet="dxy[]0123456789,-\u0663 ", max_size=12))
@example("x[\u0663,0]")
@example("x[1,2]\n")
@example("x[-1,2]")
def test_whatever_parses_is_a_value_of_that_text(text: str) -> None:
    try:
        value = parse_value(text)
    except ScheduleError:
        return
    assert str(value).isascii() and len(str(value)) <= len(text) and text.isascii()


@pytest.mark.parametrize("number", [-1, 1.0, None, "0"])
@pytest.mark.parametrize("make", [lambda n: Activation(n, 0), lambda n: InputGrad(0, n), Output, OutputGrad])
def test_a_value_cannot_hold_a_number_that_numbers_nothing(make: Any, number: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        make(number)


@given(travelling_values)
def test_values_of_one_kind_and_stage_share_a_channel_whatever_the_microbatch(value: Value) -> None:
    channel = channel_of(value, 0, 1)
    assert channel.name == str(value).partition("[")[0] + (str(getattr(value, "stage", "")))
    assert (channel.source, channel.target) == (0, 1)
    assert continued(channel) not in {channel, channel_of(value, 1, 0)}
    assert str(continued(channel)) == f"{channel.name}+:0>1"


def test_the_gradient_of_an_output_never_travels() -> None:
    with pytest.raises(ScheduleError, match=r"dy\[3\] never travels: every rank's caller computes it"):
        channel_of(OutputGrad(3), 0, 1)


def test_a_channel_joins_two_ranks_and_has_a_name_of_the_vocabulary() -> None:
    with pytest.raises(ScheduleError, match="joins rank 1 with itself"):
        Channel(1, 1, "x0")
    with pytest.raises(ValueError, match="name"):
        Channel(0, 1, "gossip")
