"""What is trained beside LoRA: custom heads and base weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from art_adapter.agreement import gather
from art_adapter.base_model import is_tied

from ..playing import NotHere, Play, close, flat
from .registry import body


@body
def a_custom_head_counts_once_and_stays_the_same_everywhere(play: Play) -> None:
    if not hasattr(play.trainer, "module"):
        raise NotHere(f"{play.host.name} has no custom heads")
    assert play.trainer.hidden_size == 64
    head = play.trainer.module("value", lambda: torch.nn.Linear(play.trainer.hidden_size, 1))
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1.0, 1.0, 64)[None])
        head.bias.zero_()
    for step in range(3):
        for window in play.windows(play.requests(4, hidden_states=True)):
            values = torch.stack([head(output.hidden_states).square().mean() for output in flat(window.outputs)])
            (play.loss(window.outputs) + values.sum()).backward()
        if step == 0:
            play.note("gradient", head.weight.grad)
        play.note_close(f"norm {step}", play.step()["grad_norm"])
    play.note_close("weight", head.weight)
    alike = [torch.empty_like(head.weight) for _ in range(dist.get_world_size())]
    dist.all_gather(alike, head.weight.detach().clone())
    assert all(torch.equal(each, head.weight) for each in alike)
    play.note_parameters()


@body
def a_single_parameter_and_a_buffer_belong_to_a_slot(play: Play) -> None:
    if not hasattr(play.trainer, "parameter"):
        raise NotHere(f"{play.host.name} has no custom heads")
    scale = play.trainer.parameter("scale", lambda: torch.full((64,), 0.5))
    seen = play.trainer.buffer("seen", lambda: torch.zeros(()))
    assert play.trainer.parameter("scale", lambda: torch.zeros(1)) is scale
    for window in play.windows(play.requests(3, hidden_states=True)):
        loss = torch.stack([(output.hidden_states * scale).square().mean() for output in flat(window.outputs)]).sum()
        seen += 1
        (loss + play.loss(window.outputs)).backward()
    play.note("gradient", scale.grad)
    play.note("seen", seen)
    play.note_close("norm", play.step()["grad_norm"])
    play.note_close("scale", scale)


@body
def a_head_that_is_not_used_does_not_change(play: Play) -> None:
    if not hasattr(play.trainer, "module"):
        raise NotHere(f"{play.host.name} has no custom heads")
    head = play.trainer.module("value", lambda: torch.nn.Linear(64, 1, bias=False))
    play.loss(play.trainer.dp_rank_forward(play.request(0))).backward()
    play.note_close("norm", play.step()["grad_norm"])
    play.note("gradient", head.weight.grad)
    play.note_parameters()


@body
def base_weights_are_trained_with_slots_and_without(play: Play) -> None:
    with base_weights_trained(play):
        for step in range(5):
            requests = [play.request(number, checkpoint="A" if step and number % 2 else None) for number in range(4)]
            for window in play.windows(requests):
                play.loss(window.outputs).backward()
            del window
            play.note_close(f"norm {step}", play.step(learning_rate=1e-3)["grad_norm"])
            check_that_copies_are_alike(play)
        play.note_parameters()


@body
def base_weights_are_stepped_zeroed_and_guarded_inside_the_loop(play: Play) -> None:
    with base_weights_trained(play, items_at_once=1):
        play.trainer.set_checkpoint(None)
        for number, window in enumerate(play.trainer.forward_micro_batches(play.requests(8))):
            loss = play.loss(window.outputs)
            loss.backward(retain_graph=number == 2)
            play.note_close(f"loss {number}", loss)
            if number == 1:
                play.trainer.zero_grad()
            if number == 2:
                play.note_error("step while outputs wait", play.step)
                loss.backward()
                play.note_close("norm", play.step(learning_rate=1e-3, checkpoints=[None])["grad_norm"])
        play.note_close("last norm", play.step(learning_rate=1e-3)["grad_norm"])
        play.note_error("nothing to step with", lambda: play.step(checkpoints=[None]))
        check_that_copies_are_alike(play)
        play.note_parameters()


@contextlib.contextmanager
def base_weights_trained(play: Play, **options: Any) -> Iterator[None]:
    """Meanwhile the caller's trainer trains the base weights too; afterwards they are frozen, and as they were."""
    if not play.host.trains_base_weights:
        raise NotHere(f"{play.host.name} trains no base weights")
    runtime = play.trainer.runtime
    weights = {weight: weight.detach().clone() for chunk in runtime.model for weight in chunk.parameters()}
    close(play.trainer)
    play.take_up(play.host.trainer(runtime, base_model=True, **options))
    try:
        yield
    finally:
        for weight, value in weights.items():
            weight.requires_grad_(False).copy_(value)
            weight.grad = None


def check_that_copies_are_alike(play: Play) -> None:
    """The embedding and the output layer that is tied to it, wherever they are, hold the same to the last bit."""
    own = [weight.detach() for weight in play.trainer._checkpoint_slot_params_by_name[None] if is_tied(weight)]
    found = gather(own, group=parallel_state.get_pipeline_model_parallel_group())
    copies = [copy for stage in found for copy in stage]
    assert all(torch.equal(copy, copies[0]) for copy in copies), [float(copy.double().norm()) for copy in copies]
