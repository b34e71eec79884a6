"""Gradients and optimizer steps: accumulated, of some slots, inside a loop, restored, over data ranks."""

from __future__ import annotations

import math

import torch
from megatron.core import parallel_state

from art_adapter.compat import slot_parameters_by_name

from ..playing import Play
from .registry import body, close_gradients


@body
def several_forwards_then_one_backward(play: Play) -> None:
    outputs = [play.trainer.dp_rank_forward(play.requests(2 + number)) for number in range(3)]
    torch.stack([play.loss(each) for each in outputs]).sum().backward()
    close_gradients(play)


@body
def gradients_accumulate_over_forwards_and_backwards(play: Play) -> None:
    for number in range(3):
        play.loss(play.trainer.dp_rank_forward(play.request(number))).backward()
        play.note_gradients(f"after {number}")
    play.trainer.zero_grad()
    play.note_gradients("after zero_grad")
    play.loss(play.trainer.dp_rank_forward(play.request(4))).backward()
    play.note_gradients("after one more")


@body
def a_retained_graph(play: Play) -> None:
    loss = play.loss(play.trainer.dp_rank_forward(play.requests(2)))
    loss.backward(retain_graph=True)
    play.note_gradients("first")
    loss.backward()
    play.note_gradients("second")
    play.note_error("third", loss.backward)


@body
def five_steps(play: Play) -> None:
    for step in range(5):
        for window in play.windows(play.requests(4)):
            loss = play.loss(window.outputs)
            loss.backward()
            (play.note if step == 0 else play.note_close)(f"step {step} loss {window.indices}", float(loss))
        if step == 0:
            play.note_gradients()
        result = play.step(scale_grads=0.5)
        play.note_close(f"step {step}", {key: float(value) for key, value in result.items()})
    play.note_parameters()


@body
def an_optimizer_step_inside_the_loop(play: Play) -> None:
    for number, window in enumerate(play.windows(play.requests(4))):
        loss = play.loss(window.outputs)
        loss.backward()
        (play.note if number == 0 else play.note_close)(f"loss {number}", float(loss))
        play.note_close(f"norm {number}", play.step(learning_rate=1e-3)["grad_norm"])
    play.note_parameters()


@body
def a_step_of_named_slots_only(play: Play) -> None:
    play.note_error("nothing to step with", play.step)
    outputs = play.trainer.dp_rank_forward([play.request(0), play.request(1, checkpoint="B")])
    play.loss(outputs).backward()
    play.note_error("unknown slot", lambda: play.step(checkpoints=["C"]))
    play.note_close("A", play.step(checkpoints=["A"])["grad_norm"])
    play.note_error("A again", lambda: play.step(checkpoints=["A"]))
    play.note_parameters("after A")
    play.note_close("B", play.step()["grad_norm"])
    play.note_parameters()


@body
def a_norm_that_is_not_finite(play: Play) -> None:
    (play.loss(play.trainer.dp_rank_forward(play.request(0))) * math.inf).backward()
    play.note("step", play.step()["update_successful"])
    play.note_parameters()
    play.note_gradients()


@body
def a_gradient_that_is_not_finite_on_one_stage(play: Play) -> None:
    play.loss(play.trainer.dp_rank_forward(play.request(0))).backward()
    for name, parameter in slot_parameters_by_name(play.trainer):
        if name.startswith("A/") and "layers.3" in name and name.endswith("lora_B"):
            parameter.grad.fill_(math.nan)
    play.note("step", play.step()["update_successful"])
    play.note_parameters()
    play.note_gradients()


@body
def a_step_of_one_slot_while_outputs_of_another_wait(play: Play) -> None:
    one, other = (play.trainer.dp_rank_forward(play.requests(2, checkpoint=name)) for name in "AB")
    play.loss(one).backward()
    play.note_close("A", play.step(checkpoints=["A"])["grad_norm"])
    play.loss(other).backward()
    play.note_gradients()
    play.note_close("B", play.step()["grad_norm"])
    play.note_parameters()


@body
def a_step_inside_the_loop_while_outputs_of_another_slot_wait(play: Play) -> None:
    waiting = []
    for number, window in enumerate(play.windows(play.requests(4))):
        if number % 2:
            play.loss(window.outputs).backward()
            play.note_close(f"norm {number}", play.step(learning_rate=1e-3)["grad_norm"])
        else:
            waiting.append(window.outputs)
        play.trainer.set_checkpoint("A" if number % 2 else "B")
    del window
    torch.stack([play.loss(outputs) for outputs in waiting]).sum().backward()
    close_gradients(play)
    play.note_close("norm", play.step()["grad_norm"])
    play.note_parameters()


@body
def zero_grad_inside_the_loop(play: Play) -> None:
    for number, window in enumerate(play.windows(play.requests(4))):
        play.loss(window.outputs).backward()
        if number == 1:
            play.trainer.zero_grad()
    play.note_gradients()


@body
def a_restored_optimizer_goes_on_as_if_never_saved(play: Play) -> None:
    trainer = play.trainer
    play.note("before the first step", trainer.checkpoint_slot_optimizer_state("A"))
    for _ in range(2):
        play.loss(trainer.dp_rank_forward(play.requests(2))).backward()
        play.step()
    state = trainer.checkpoint_slot_optimizer_state("A")
    play.host.load(trainer, "A", 1)
    restored = dict(play.host.load_options, optimizer_state=state)
    full = play.host.adapter(trainer.runtime.provider, seed=1)
    trainer.load_checkpoint_slot("A", full, alpha=8.0, **restored)
    play.loss(trainer.dp_rank_forward(play.requests(2))).backward()
    play.note_close("norm", play.step()["grad_norm"])
    play.note_parameters()

    def load_foreign() -> None:
        play.host.load(trainer, "D", 4, r=2)
        foreign = play.host.adapter(trainer.runtime.provider, seed=4, r=2)
        options = {**restored, **({"adapter_config": None} if play.host.is_art else {})}
        trainer.load_checkpoint_slot("D", foreign, alpha=8.0, **options)

    play.note_error("foreign state", load_foreign)


@body
def data_is_reduced_over_data_ranks_only(play: Play) -> None:
    ones = torch.ones(3)
    play.trainer.dp_reduce(ones)
    play.note("ones", ones)
    assert float(ones[0]) == parallel_state.get_data_parallel_world_size()
    for window in play.windows(play.requests(3)):  # uneven, and empty on a rank at the end
        total = torch.zeros(())
        if window.outputs:
            loss = play.loss(window.outputs)
            loss.backward()
            total += loss.detach()
        play.trainer.dp_reduce(total)
        play.note(f"total {window.stats.global_start}", total)
        play.note(f"indices {window.stats.global_start}", window.indices)
    play.note_gradients()
    play.note_close("norm", play.step()["grad_norm"])
    play.note_parameters()
