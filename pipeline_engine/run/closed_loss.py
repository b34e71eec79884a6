"""The loss of the closed loop: computed and differentiated by the engine, where the last stage is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from pipeline_engine.errors import UsageError
from pipeline_engine.run.call import Call
from pipeline_engine.run.cargo import Cargo
from pipeline_engine.run.stage import receive

LossFunction = Callable[[Any, int], torch.Tensor]
"""``loss_fn(outputs, index)`` returns a scalar; ``index`` is the caller's number of the microbatch."""


def collects_losses(call: Call, loss_fn: LossFunction) -> list[torch.Tensor]:
    """Have a call compute and differentiate the loss of each microbatch that it reaches; the list is filled then."""
    losses: list[torch.Tensor] = []

    def compute(microbatch: int, cargo: Cargo) -> None:
        outputs, entry = receive(cargo, differentiate=call.modes.differentiates)
        number = call.order[microbatch]
        loss = _checked(loss_fn(outputs, number), number)
        if call.modes.differentiates:
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            elif entry.anchors:
                _refuse_cut_off(number)
            call.executor.give(microbatch, entry.take())
        losses.append(loss.detach())

    call.executor.on_yield = compute
    return losses


def _checked(loss: object, number: int) -> torch.Tensor:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    what = f"tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise UsageError(
        f"loss_fn returned a {what} for microbatch {number}; step differentiates a tensor with one element: return it."
    )


def _refuse_cut_off(number: int) -> NoReturn:
    """Plain autograd would raise too; without a word the stages would be left without gradients."""
    raise UsageError(
        f"loss_fn returned a loss that requires no gradient for microbatch {number}, whose outputs require one; step "
        "differentiates it: compute it from the outputs without detach(), item() or no_grad(), or call step under "
        "torch.no_grad() if no gradient is wanted."
    )
