"""What breaks on one rank, in a layer, in the caller's loss or for want of memory, is known to all, and soon over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch
from megatron.core import parallel_state

from art_adapter.runtime import language_model
from art_adapter.tiny_gpt import Cut

from .hosts import host
from .playing import Play
from .processes import on_ranks
from .test_trainer import told

SECONDS = 10.0
Told = tuple[str, str, float]
"""Name of what was raised, its text, and the seconds until then."""


@contextmanager
def failing(play: Play, *, at: int, backward: bool = False, error: type[Exception] = ArithmeticError) -> Iterator[None]:
    """Meanwhile this rank's last layer raises the ``at``-th time it runs."""
    runs = iter(range(100))

    def fail(*_: Any) -> None:
        if next(runs) == at:
            raise error("this layer cannot")

    layer = language_model(play.trainer.runtime.model[0]).decoder.layers[-1]
    register = layer.register_full_backward_hook if backward else layer.register_forward_hook
    handle = register(fail)
    try:
        yield
    finally:
        handle.remove()


def loop(play: Play, *, loss_fails_at: int = -1) -> float:
    """A loop and its step; a rank that had done its part when another failed hears of it in the step."""
    for number, window in enumerate(play.windows(play.requests(6))):
        loss = play.loss(window.outputs)
        if number == loss_fails_at:
            raise ArithmeticError("this caller's loss cannot")
        loss.backward()
    del window, loss
    return play.step()["grad_norm"]


def all_at_once(play: Play) -> None:
    play.loss(play.trainer.dp_rank_forward(play.requests(3))).backward()


def in_a_forward(play: Play, culprit: bool) -> None:
    with failing(play, at=1 if culprit else -1):
        loop(play)


def in_a_backward(play: Play, culprit: bool) -> None:
    with failing(play, at=1 if culprit else -1, backward=True):
        loop(play)


def in_a_forward_of_all_at_once(play: Play, culprit: bool) -> None:
    with failing(play, at=0 if culprit else -1):
        all_at_once(play)


def out_of_memory(play: Play, culprit: bool) -> None:
    with failing(play, at=1 if culprit else -1, error=torch.cuda.OutOfMemoryError):
        loop(play)


def out_of_memory_ahead(play: Play, culprit: bool) -> None:
    """A rank that has its window already hears of it in its step."""
    for _ in play.windows(play.requests(6)):  # after a loop that went wrong windows are planned one at a time
        pass
    own = 0 if parallel_state.is_pipeline_last_stage() else 1  # the last stage runs nothing ahead
    with failing(play, at=own if culprit else -1, error=torch.cuda.OutOfMemoryError):
        next(play.windows(play.requests(6)))
        play.step()


def in_the_callers_loss(play: Play, culprit: bool) -> None:
    loop(play, loss_fails_at=1 if culprit else -1)


def too_little_memory(play: Play, culprit: bool) -> None:
    own = play.trainer.memory_budget_bytes
    play.trainer.memory_budget_bytes = 1000 if culprit else own
    try:
        all_at_once(play)
    finally:
        play.trainer.memory_budget_bytes = own


FAILURES: dict[str, Callable[[Play, bool], None]] = {
    function.__name__: function
    for function in (
        in_a_forward,
        in_a_backward,
        in_a_forward_of_all_at_once,
        out_of_memory,
        out_of_memory_ahead,
        in_the_callers_loss,
        too_little_memory,
    )
}


def break_down(rank: int, ranks: int) -> tuple[dict[str, tuple[Told, list[Told]]], float]:
    """On one rank: each failure on each of two ranks in turn, and what the calls after it say until one works.

    Returns:
        that, and the gradient norm of a step after all of it.
    """
    own = host("reference")
    play = Play(own, own.build(Cut(pipeline=ranks)))
    seen = {}
    for name, fail in FAILURES.items():
        for culprit in (0, ranks - 1):
            found = told(lambda fail=fail, culprit=culprit: fail(play, rank == culprit))
            after = [told(lambda: all_at_once(play))]
            while after[-1][0] != "nothing" and len(after) < 3:
                after.append(told(lambda: all_at_once(play)))
            seen[f"{name} on {culprit}"] = (found, after)
            play.trainer.zero_grad()
    norm = loop(play)
    play.trainer.close()
    return seen, norm


def undisturbed(rank: int) -> float:
    own = host("reference")
    return loop(Play(own, own.build(Cut())))


@pytest.fixture(scope="module", params=[2, 4])
def seen(request: pytest.FixtureRequest) -> Any:
    return on_ranks(break_down, request.param, request.param)


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("first", [True, False])
def test_every_rank_raises_within_ten_seconds_and_names_the_one_at_fault(seen: Any, name: str, first: bool) -> None:
    culprit = 0 if first else len(seen) - 1
    for rank, each in enumerate(seen):
        (kind, text, seconds), _ = each[0][f"{name} on {culprit}"]
        assert kind != "nothing" and seconds < SECONDS, (rank, kind, text, seconds)
        if name == "too_little_memory":  # the ranks agree on it
            assert kind == "TrainerRankMemoryError" and "1000 are available" in text
        elif name in ("out_of_memory", "out_of_memory_ahead"):
            (_, first_text, _), _ = seen[0][0][f"{name} on {culprit}"]
            assert kind == "TrainerRankMemoryError" and "pass fewer or shorter inputs" in text and text == first_text
        elif rank == culprit:
            assert "cannot" in text and kind == "ArithmeticError"
        elif name == "in_the_callers_loss" and kind == "UsageError":  # it had all it needed, and found out in its step
            assert f"rank {culprit} has 'meet'" in text and "'flush'" in text
        else:
            assert kind == "PeerFailedError" and f"rank {culprit}" in text, text


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("first", [True, False])
def test_the_next_call_works(seen: Any, name: str, first: bool) -> None:
    """After a failure of the caller's own, of which the others hear by his next call, it is the one after that."""
    culprit = 0 if first else len(seen) - 1
    for rank, each in enumerate(seen):
        _, after = each[0][f"{name} on {culprit}"]
        assert after[-1][0] == "nothing" and all(seconds < SECONDS for _, _, seconds in after), (rank, after)
        assert len(after) <= 1 + (name == "in_the_callers_loss" and rank == culprit), (rank, after)


def test_a_step_after_all_that_is_the_step_of_a_trainer_that_was_never_disturbed(seen: Any) -> None:
    (expected,) = on_ranks(undisturbed, 1)
    assert [norm for _, norm in seen] == [expected] * len(seen)
