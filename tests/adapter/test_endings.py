"""What is left of a forward once its backward has passed, or can never come, while the caller keeps its outputs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("megatron.core")


from art_adapter.runtime import language_model
from art_adapter.tiny_gpt import Cut

from .devices import Device
from .hosts import host
from .playing import Play, Seen, difference
from .processes import on_ranks
from .test_trainer import told

TOKENS = 10
"""Of a request."""


def endings(rank: int, cut: Cut) -> dict[str, Any]:
    """Tokens whose graphs a rank keeps at one point after the other, and what late backwards say."""
    own = host("reference")
    play = Play(own, own.build(cut))
    device = Device(bytes_per_token=1)
    for chunk in play.trainer.runtime.model:
        language_model(chunk).decoder.register_forward_hook(device.note)
    return {**refused(play), **kept(play, device), "after close": after_close(play)}


def kept(play: Play, device: Device) -> dict[str, int]:
    play.trainer.items_at_once = 1
    requests = [play.request(number, length=TOKENS) for number in range(4)]
    given, waiting = [], []
    for window in play.trainer.forward_micro_batches(requests):
        play.loss(window.outputs).backward()
        given.append(window.outputs)
    seen = {"given": device.allocated()}
    for window in play.trainer.forward_micro_batches(requests):
        waiting.append(window.outputs)
    seen["given and waiting"] = device.allocated()
    del waiting, window
    play.step()
    seen["let go of"] = device.allocated()
    assert len(given) == 4
    return seen


def refused(play: Play) -> dict[str, Any]:
    """A second derivative is refused; a backward without it is none the worse for it."""
    words = second_derivative(play)
    play.trainer.zero_grad()
    play.loss(play.trainer.dp_rank_forward(play.requests(2))).backward()
    play.note_gradients()
    play.trainer.zero_grad()
    return {"create_graph": words, "and then": play.seen}


def second_derivative(play: Play) -> tuple[str, str]:
    loss = play.loss(play.trainer.dp_rank_forward(play.requests(2)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of create_graph=True by itself
        kind, words, _ = told(lambda: loss.backward(create_graph=True))
    return kind, words


def after_close(play: Play) -> tuple[str, str]:
    loss = play.loss(play.trainer.dp_rank_forward(play.requests(2)))
    play.trainer.close()
    kind, words, _ = told(loss.backward)
    return kind, words


def undisturbed(rank: int) -> Seen:
    own = host("reference")
    play = Play(own, own.build(Cut()))
    play.loss(play.trainer.dp_rank_forward(play.requests(2))).backward()
    play.note_gradients()
    return play.seen


CUTS = {"two stages": (2, Cut(pipeline=2)), "two chunks on one rank": (1, Cut(virtual=2))}


@pytest.fixture(scope="module", params=CUTS)
def seen(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    ranks, cut = CUTS[request.param]
    return on_ranks(endings, ranks, cut)


def test_a_stage_keeps_nothing_for_outputs_whose_backward_has_passed(seen: Any) -> None:
    chunks = 2 // len(seen)
    for stage in seen:
        assert stage["given"] == 0
        assert stage["given and waiting"] == chunks * 4 * TOKENS
        assert stage["let go of"] == 0


def test_second_derivatives_are_refused_and_spoil_nothing(seen: Any) -> None:
    for stage in seen:
        kind, words = stage["create_graph"]
        assert kind == "UsageError" and "create_graph=True" in words
    (expected,) = on_ranks(undisturbed, 1)
    why = difference(expected, [stage["and then"] for stage in seen])
    assert not why, why


def test_a_backward_after_close_says_that_it_comes_too_late(seen: Any) -> None:
    for stage in seen:
        kind, words = stage["after close"]
        assert kind == "UsageError" and "which was dropped when the pipeline was closed" in words
