"""The bodies by name, and what several of them need."""

from __future__ import annotations

from typing import Any

import torch

from art_adapter.compat import slot_parameters_by_name

from ..playing import Body, Play

BODIES: dict[str, Body] = {}


def body(function: Body) -> Body:
    """Register a body."""
    BODIES[function.__name__] = function
    return function


def without_targets(play: Play, request: Any) -> Any:
    return play.host.records.ForwardInput(
        input_tokens=request.input_tokens,
        top_k=request.top_k,
        logits=request.logits,
        hidden_states=request.hidden_states,
    )


def finish_what_was_given(play: Play) -> None:
    """With several chunks a rank may still owe backwards when a loop is left early; the next call begins with them."""
    with torch.no_grad():
        play.trainer.dp_rank_forward(play.request(0))


def close_gradients(play: Play) -> None:
    """Gradients that were added up in another order than one process adds them."""
    for name, parameter in slot_parameters_by_name(play.trainer):
        if parameter.grad is not None:
            play.seen.here_close[f"gradients: {name}"] = parameter.grad.clone()


def stats_of(window: Any) -> list[int]:
    stats = window.stats
    return [stats.global_start, stats.global_stop, stats.global_count, stats.local_count, stats.packed_tokens]


def shape_of(item: Any) -> Any:
    return [shape_of(each) for each in item] if isinstance(item, (list, tuple)) else "output"
