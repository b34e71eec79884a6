"""A stage's work on one microbatch: a forward whose cut is invisible to autograd, and its backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import define, frozen
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeline_engine.run.cargo import Cargo, Grads
from pipeline_engine.run.split import UNASKED, WeightPart, plan_split, run_input_part

StageFunction = Callable[..., Any]

with torch.inference_mode(False):
    ANCHOR = torch.zeros((), requires_grad=True, device="cpu")
"""The leaf behind every history that the engine gives a tensor; no gradient ever gets to it."""


@define(eq=False)
class Tap:
    """Where the gradient of one received tensor comes out."""

    grad: torch.Tensor | None = None


class _Received(torch.autograd.Function):
    """Gives a received tensor a history: a non-leaf whose gradient ends in a tap, once, all uses summed.

    The tensor comes in a list, so that autograd takes it for a fresh output and not for a view of an input: the
    stage may change it in place.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tap: Tap, tensor: list[torch.Tensor]) -> torch.Tensor:
        ctx.tap = tap
        return tensor.pop()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.tap.grad = grads[0]
        return None, None, None


@frozen(eq=False)
class Entry:
    """Where the gradients of a received cargo come out.

    Attributes:
        taps: for each leaf of the cargo, where its gradient comes out.
        anchors: the leaf behind that history, if there is one: a backward that asks for it fills the taps.
    """

    taps: tuple[Tap, ...]
    anchors: tuple[torch.Tensor, ...]

    @property
    def grads(self) -> Grads:
        """What the last backward brought."""
        return tuple(tap.grad for tap in self.taps)


def receive(cargo: Cargo, *, differentiate: bool) -> tuple[Any, Entry]:
    """What a stage is called with in the place of a cargo: its tree, whose tensors have a history that ends at taps.

    The tensors of ``cargo`` are used up: it must not be read again.
    """
    taps = tuple(Tap() for _ in cargo.leaves)
    if not differentiate or not any(cargo.needs_grad):
        return cargo.tree(), Entry(taps, ())
    leaves = [
        _Received.apply(ANCHOR, tap, [leaf]) if wanted else leaf  # type: ignore[no-untyped-call]
        for leaf, wanted, tap in zip(cargo.leaves, cargo.needs_grad, taps, strict=True)
    ]
    return cargo.tree(leaves), Entry(taps, (ANCHOR,))


@frozen(eq=False)
class Ran:
    """What a forward leaves behind for its backward: the graph, and of tensors only what the graph saved.

    Attributes:
        entries: by received argument, where its gradients come out.
        exits: by leaf of what the stage returned, each once: where its gradient goes in; None if it wants none.
    """

    entries: tuple[Entry, ...]
    exits: tuple[GradientEdge | None, ...]

    def backward(self, grads: Grads, *, retain_graph: bool) -> tuple[Grads, ...]:
        """Run the stage's backward; returns the gradients of each received argument."""
        roots, root_grads = self._roots(grads)
        if roots:
            torch.autograd.backward(roots, root_grads, retain_graph=retain_graph)
        return tuple(entry.grads for entry in self.entries)

    def backward_input(self, grads: Grads, *, retain_graph: bool) -> tuple[tuple[Grads, ...], WeightPart]:
        """Run the first half of a split backward; returns the gradients of each argument, and the second half.

        What cannot be split runs whole, and the second half has nothing left to do; what nobody asks an input gradient
        of is left to the second half.
        """
        roots, root_grads = self._roots(grads)
        anchors = [anchor for entry in self.entries for anchor in entry.anchors]
        if not anchors:
            return tuple(entry.grads for entry in self.entries), WeightPart(UNASKED, roots, root_grads)
        split = plan_split(roots, anchors)
        if split.deferred:
            part = run_input_part(split, roots, root_grads, anchors)
        else:
            part = WeightPart(split)
            if roots:
                torch.autograd.backward(roots, root_grads, retain_graph=retain_graph)
        return tuple(entry.grads for entry in self.entries), part

    def _roots(self, grads: Grads) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Exits that have a gradient, and the gradients; taps are emptied for them."""
        for tap in (tap for entry in self.entries for tap in entry.taps):
            tap.grad = None
        roots = [
            (root, grad) for root, grad in zip(self.exits, grads, strict=True) if grad is not None and root is not None
        ]
        return [root for root, _ in roots], [grad for _, grad in roots]


def run_forward(
    stage: StageFunction, received: list[Cargo], inputs: tuple[Any, ...], shared: Mapping[str, Any], *, keep: bool
) -> tuple[Cargo, Ran | None]:
    """Call a stage.

    Args:
        stage: any callable.
        received: arguments that come from other stages.
        inputs: arguments that come from the caller (first stage only).
        shared: keyword arguments.
        keep: whether a backward will follow.

    Returns:
        What it returned, detached, and what its backward needs (None if there will be none).
    """
    arguments = [receive(cargo, differentiate=keep) for cargo in received]
    returned = stage(*(tree for tree, _ in arguments), *inputs, **shared)
    cargo, outputs = Cargo.with_leaves(returned)
    return cargo, Ran(tuple(entry for _, entry in arguments), tuple(map(_exit, outputs))) if keep else None


def _exit(output: Any) -> GradientEdge | None:
    wants_grad = isinstance(output, torch.Tensor) and output.requires_grad
    return get_gradient_edge(output) if wants_grad else None
