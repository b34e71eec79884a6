"""What a forward hands out, whatever is asked for, and what of it a caller gets wrong."""

from __future__ import annotations

from itertools import product

import torch

from ..playing import NotHere, Play
from .registry import body, without_targets


@body
def all_combinations_of_outputs(play: Play) -> None:
    wants = []
    for number, (targets, top_k, logits, hidden) in enumerate(product([False, True], [None, 3], [False, True], [0, 1])):
        request = play.request(number, top_k=top_k, logits=logits, hidden_states=bool(hidden))
        wants.append(request if targets else without_targets(play, request))
    outputs = play.trainer.dp_rank_forward([wants[:5], [[wants[5:9]], wants[9]], [[[wants[10:]]]]])
    play.note_outputs("outputs", outputs)
    play.loss(outputs).backward()
    play.note_gradients()


@body
def several_and_ignored_targets(play: Play) -> None:
    request = play.request(0, length=9)
    targets = torch.stack([request.target_tokens, torch.full((9,), -100), request.input_tokens], dim=1)
    targets[4] = -100
    ignored = torch.full((9,), -100)
    make = play.host.records.ForwardInput
    outputs = play.trainer.dp_rank_forward(
        [
            make(input_tokens=request.input_tokens, target_tokens=targets),
            make(input_tokens=request.input_tokens, target_tokens=ignored),
            make(input_tokens=request.input_tokens.reshape(3, 3), target_tokens=request.target_tokens.reshape(3, 3)),
        ]
    )
    play.note_outputs("outputs", outputs)
    play.loss(outputs).backward()
    play.note_gradients()


@body
def outputs_may_be_changed_in_place(play: Play) -> None:
    output = play.trainer.dp_rank_forward(play.request(0, logits=True))

    def change() -> None:
        output.logits.div_(2.0)
        (output.logits.square().mean() + output.target_logprobs.mean()).backward()

    play.note_error("in place", change)
    play.note_gradients()


@body
def without_gradients(play: Play) -> None:
    with torch.no_grad():
        play.note_outputs("no_grad", play.trainer.dp_rank_forward(play.requests(3, logits=True)))
        play.note_outputs("windows", [w.outputs for w in play.windows(play.requests(3))])
    with torch.inference_mode():
        play.note_outputs("inference_mode", play.trainer.dp_rank_forward(play.requests(2)))
    outputs = play.trainer.dp_rank_forward(play.requests(2))
    play.loss(outputs).backward()
    play.note_gradients()


@body
def some_inputs_without_gradients(play: Play) -> None:
    """``no_grad`` per input, where the host has it."""
    has_it = "no_grad" in getattr(play.host.records.ForwardInput, "__dataclass_fields__", ())
    requests = [play.request(n, **({"no_grad": n % 2 == 0} if has_it else {})) for n in range(4)]
    outputs = play.trainer.dp_rank_forward(requests)
    play.note_outputs("outputs", outputs)
    play.loss(outputs).backward()
    play.note_gradients()


@body
def what_inputs_leave_open_is_decided_by_the_call(play: Play) -> None:
    """``checkpoint`` and ``no_grad`` per call, where the host has them."""
    if "no_grad" not in getattr(play.host.records.ForwardInput, "__dataclass_fields__", ()):
        raise NotHere(f"{play.host.name} decides nothing by call")
    requests = [play.request(0), play.request(1, checkpoint="A", no_grad=True), play.request(2, no_grad=False)]
    outputs = play.trainer.dp_rank_forward(requests, checkpoint="B")
    play.note_outputs("forward", outputs)
    play.loss(outputs).backward()
    for window in play.trainer.forward_micro_batches(requests, checkpoint="B", no_grad=True):
        play.note_outputs(f"window {window.indices}", window.outputs)
        if any(output.target_logprobs.requires_grad for output in window.outputs):
            play.loss(window.outputs).backward()
        play.trainer.set_checkpoint(None)  # planned again, with what the call decided
    play.note_gradients()


@body
def what_a_caller_can_do_wrong(play: Play) -> None:
    trainer, good = play.trainer, play.request(0)
    make = play.host.records.ForwardInput
    wrong = {
        "dict": {"a": good},
        "text": ["text"],
        "empty": [make(input_tokens=torch.arange(0), logits=True)],
        "targets": [make(input_tokens=torch.arange(4), target_tokens=torch.arange(3))],
        "top_k": [make(input_tokens=torch.arange(4), top_k=257)],
    }
    for name, inputs in wrong.items():
        play.note_error(name, lambda inputs=inputs: trainer.dp_rank_forward(inputs))
        play.note_error(f"{name} in a loop", lambda inputs=inputs: list(play.windows([inputs])))
    play.note_outputs("and then", trainer.dp_rank_forward(good))
