"""Which slot a forward uses, and what a change of slots does to outputs that wait."""

from __future__ import annotations

from typing import Any

from ..playing import Play
from .registry import body, stats_of


@body
def slots_are_selected_by_default_push_and_request(play: Play) -> None:
    trainer, request = play.trainer, play.request(0)
    trainer.load_lora_slot("F", play.host.adapter(trainer.runtime.provider, seed=3), alpha=8.0)
    play.note_outputs("A", trainer.dp_rank_forward(request))
    with trainer.push_checkpoint("B"):
        play.note_outputs("B", trainer.dp_rank_forward(request))
        with trainer.push_checkpoint(None):
            play.note_outputs("base", trainer.dp_rank_forward(request))
        with trainer.push_lora("F"):
            play.note_outputs("frozen", trainer.dp_rank_forward(request))
        play.note_error("load while pushed", lambda: play.host.load(trainer, "C", 4))
        play.note_error("set while pushed", lambda: trainer.set_checkpoint("A"))
    trainer.set_checkpoint("B")
    play.note_outputs("B again", trainer.dp_rank_forward(request))
    play.note_error("pop too often", trainer.pop_pushed_lora_or_checkpoint)


@body
def slots_mixed_in_one_call(play: Play) -> None:
    selections: list[dict[str, Any]] = [{}, {"checkpoint": "B"}, {"checkpoint": None}, {"checkpoint": "A"}, {}]
    requests = [play.request(number, **selection) for number, selection in enumerate(selections)]
    outputs = play.trainer.dp_rank_forward(requests)
    play.note_outputs("outputs", outputs)
    play.loss(outputs).backward()
    play.note_gradients()
    for window in play.windows([requests[:2], requests[2:]]):
        play.note_outputs(f"window {window.indices}", window.outputs)
        play.loss(window.outputs).backward()
    play.note_gradients("windows")
    play.note_close("norm", play.step()["grad_norm"])
    play.note_parameters()


@body
def another_slot_inside_the_loop(play: Play) -> None:
    for number, window in enumerate(play.windows(play.requests(5))):
        play.note_outputs(f"window {number}", window.outputs)
        play.note(f"place {number}", [window.indices, stats_of(window)])
        play.loss(window.outputs).backward()
        play.trainer.set_checkpoint("B" if number % 2 == 0 else "A")
    play.note_gradients()


@body
def a_slot_loaded_inside_the_loop(play: Play) -> None:
    for number, window in enumerate(play.windows(play.requests(4))):
        play.note_outputs(f"window {number}", window.outputs)
        play.loss(window.outputs).backward()
        del window
        play.trainer.zero_grad()
        if number == 1:
            play.host.load(play.trainer, "A", 5)


@body
def outputs_that_wait_keep_their_slot_as_it_is(play: Play) -> None:
    outputs = play.trainer.dp_rank_forward(play.requests(2))
    loss = play.loss(outputs)
    loss.backward(retain_graph=True)
    play.note_error("step", play.step)
    play.note_error("load", lambda: play.host.load(play.trainer, "A", 9))
    loss.backward()
    play.note_gradients()
    play.note_close("norm", play.step()["grad_norm"])
    play.note_parameters()
