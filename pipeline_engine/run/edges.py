"""Edges: where gradients go into a stage's graph and come out of it, without what torch's front for that costs.

Note [torch's front]: ``get_gradient_edge`` and ``torch.autograd.backward`` look again at what is known here: that a
tensor has a history, that there is a gradient for each edge, of its shape and on its device (the engine behind them
checks that too).  ``torch.autograd.Function`` looks for transforms of functorch, which no pipeline can be under (its
base refuses them).  Where code runs cold, as after a wait, that is a quarter of the time of a small stage's backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge


class Passage(torch.autograd.Function):
    """A function by which tensors cross a cut; see Note [torch's front]."""

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        """Call ``forward`` and give what it returns a history."""
        return super(torch.autograd.Function, cls).apply(*arguments)  # type: ignore[misc]  # of a base in C


def edge_of(output: Any) -> GradientEdge | None:
    """Where the gradient of an output goes in; None if it wants none."""
    if not isinstance(output, torch.Tensor) or not output.requires_grad:
        return None
    node = output.grad_fn
    if node is None:  # a leaf
        return get_gradient_edge(output)
    # A node that is an object of Python does not own the graph behind it; one of torch's that leads there does.
    owner = output.view_as(output).grad_fn if isinstance(node, torch._C._FunctionBase) else None
    return GradientEdge(node, output.output_nr, owner)


def run_backward(
    roots: Sequence[GradientEdge],
    grads: Sequence[torch.Tensor],
    *,
    retain_graph: bool,
    inputs: Sequence[torch.Tensor] = (),
) -> None:
    """Accumulate the gradients of ``inputs``, or else of all leaves behind ``roots``, if there are any."""
    if roots:
        _engine_run_backward(
            tuple(roots), tuple(grads), retain_graph, False, tuple(inputs), allow_unreachable=True, accumulate_grad=True
        )


def ask_for(inputs: Sequence[GradientEdge], scalar: torch.Tensor) -> None:
    """Run the backward of a scalar that leads to some of ``inputs`` at most; what it brings there is dropped."""
    one = torch.ones((), device="cpu")
    _engine_run_backward((scalar,), (one,), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False)
