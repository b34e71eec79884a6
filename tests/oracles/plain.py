"""Independent truth about numbers: one process, a graph of stages, plain autograd, one backward per microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import nn

Gradients = dict[str, torch.Tensor]


@frozen
class Plain:
    """What plain autograd finds.

    Attributes:
        outputs: for each microbatch what the last stage returned.
        losses: for each microbatch the loss.
        gradients: for each microbatch, by stage, its own gradients by parameter name; nothing is added up yet.
    """

    outputs: list[Any]
    losses: list[torch.Tensor]
    gradients: list[list[Gradients]]

    def summed(self, stage: int, order: Iterable[int]) -> Gradients:
        """What is left in ``.grad`` of one stage after these microbatches' backwards in this order."""
        total: Gradients = {}
        for microbatch in order:
            for name, grad in self.gradients[microbatch][stage].items():
                total[name] = total[name] + grad if name in total else grad
        return total


def run_plain(
    stages: Sequence[nn.Module],
    inputs: Sequence[tuple[Any, ...]],
    shared: Sequence[Mapping[str, Any]],
    loss: Callable[[Any, int], torch.Tensor],
    before: Callable[[int], Sequence[int]] = lambda stage: (stage - 1,),
) -> Plain:
    """Run every microbatch by itself.

    Args:
        stages: in the order of their numbers.
        inputs: for each microbatch the arguments of stage 0.
        shared: for each microbatch the keywords of every stage.
        loss: of the last stage's output and the number of the microbatch; without history it has no backward.
        before: for a stage other than 0 those whose output it takes; a chain unless it is given.
    """
    plain = Plain([], [], [])
    for microbatch, (given, keywords) in enumerate(zip(inputs, shared, strict=True)):
        values = [stages[0](*given, **keywords)]
        for number, stage in enumerate(stages[1:], 1):
            values.append(stage(*(values[other] for other in before(number)), **keywords))
        value = values[-1]
        plain.outputs.append(_leaf(value) if isinstance(value, torch.Tensor) else value)
        lost = loss(value, microbatch)
        if lost.requires_grad:
            lost.backward()
        plain.losses.append(lost.detach())
        plain.gradients.append([gradients_of(stage) for stage in stages])
        for stage in stages:
            stage.zero_grad(set_to_none=True)
    return plain


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def gradients_of(stage: nn.Module) -> Gradients:
    """A stage's gradients by parameter name; parameters without one are left out."""
    return {name: parameter.grad for name, parameter in stage.named_parameters() if parameter.grad is not None}
