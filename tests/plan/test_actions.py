"""Actions read back whole, and the law of what they need and make is the paper's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan import actions as verbs
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
    maker_of,
    makes,
    needs,
    parse_action,
    sized_by,
    suppliers_of,
    takers_of,
)
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.values import Activation, InputGrad, Output, OutputGrad
from tests.strategies import actions

SKIPPING = StageGraph(edges=[(0, 1), (1, 2), (0, 2)], rank_of=[0, 1, 2])
CHAIN = StageGraph.chain(3, 3)


def test_the_ten_verbs_are_written_as_the_page_says() -> None:
    x = Activation(0, 1)
    written = {
        "2F0": Forward(2, 0),
        "2B0": Backward(2, 0),
        "2I0": BackwardInput(2, 0),
        "2W0": BackwardWeight(2, 0),
        "publish:y[0]": Publish(0),
        "yield:y[0]": Yield(0),
        "send:x[0,1]>1": Send(x, 1),
        "sent:x[0,1]>1": WaitSend(x, 1),
        "post:x[0,1]<0": PostRecv(x, 0),
        "recv:x[0,1]<0": WaitRecv(x, 0),
    }
    assert {str(action): action for action in written.values()} == written
    page = verbs.__doc__ or ""
    for text, action in written.items():
        assert text in page.split() and type(action).__name__ in page.split()


@given(actions)
def test_an_action_is_read_back_from_its_text(action: Action) -> None:
    assert parse_action(str(action)) == action


@given(actions, st.text(alphabet="Fx ,[]<>:\n", min_size=1, max_size=3))
@example(Forward(0, 0), "junk")
def test_text_after_an_action_is_refused(action: Action, junk: str) -> None:
    with pytest.raises(ScheduleError, match="is not a"):
        parse_action(f"{action}{junk}")


@pytest.mark.parametrize(
    "junk",
    [
        "",
        "F",
        "0F",
        "F0",
        "0F0junk",
        "0X0",
        "-1F0",
        "0 F0",
        "\u0663F0",
        "send:x[0,1]<1",
        "send:dy[0]>1",
        "yield:x[0,0]",
    ],
)
def test_junk_is_refused(junk: str) -> None:
    with pytest.raises(ScheduleError, match="is not a"):
        parse_action(junk)


@pytest.mark.parametrize("number", [-1, 1.0, None, "0"])
@pytest.mark.parametrize(
    "make", [lambda n: Forward(n, 0), lambda n: Backward(0, n), Yield, Publish, lambda n: Send(Output(0), n)]
)
def test_an_action_cannot_hold_a_number_that_numbers_nothing(make: Any, number: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        make(number)


def test_a_forward_takes_the_outputs_of_the_stages_before_it() -> None:
    assert needs(Forward(0, 5), SKIPPING) == ()
    assert needs(Forward(2, 5), SKIPPING) == (Activation(0, 5), Activation(1, 5))
    assert makes(Forward(2, 5)) == (Activation(2, 5),)


def test_a_backward_takes_its_own_forward_and_the_gradients_of_all_consumers() -> None:
    assert needs(Backward(0, 5), SKIPPING) == (Activation(0, 5), InputGrad(1, 5), InputGrad(2, 5))
    assert needs(Backward(2, 5), SKIPPING) == (Activation(2, 5), OutputGrad(5))
    assert makes(Backward(2, 5)) == makes(BackwardInput(2, 5)) == (InputGrad(2, 5),)
    assert needs(BackwardWeight(2, 5), SKIPPING) == (InputGrad(2, 5),)


def test_only_the_caller_makes_the_gradient_of_an_output() -> None:
    assert needs(Yield(5), CHAIN) == (Output(5),) and makes(Yield(5)) == (OutputGrad(5),)
    assert needs(Publish(5), CHAIN) == (Activation(2, 5),) and makes(Publish(5)) == (Output(5),)


def test_a_value_is_made_on_one_rank_and_goes_once_to_each_other_rank_that_takes_it() -> None:
    looped = StageGraph(edges=[(0, 1), (0, 2), (1, 3), (2, 3)], rank_of=[0, 1, 1, 0])
    assert takers_of(Activation(0, 5), looped) == (1,)
    assert takers_of(Activation(1, 5), looped) == (0,)
    assert takers_of(InputGrad(3, 5), looped) == (1,)
    assert maker_of(InputGrad(3, 5), looped) == 0 == maker_of(Output(5), looped)
    assert suppliers_of(InputGrad(3, 5), 1, looped) == (1, 2)


def test_a_gradient_is_as_large_as_what_its_receiver_sent() -> None:
    assert sized_by(InputGrad(2, 5), 0, SKIPPING) == (Activation(0, 5),)
    assert sized_by(Activation(2, 5), 0, SKIPPING) == ()
