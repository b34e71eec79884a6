"""A stage's work on one microbatch: a forward whose cut is invisible to autograd, and its backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen
from torch.autograd.graph import GradientEdge

from pipeline_engine.run.cargo import Cargo, Grads, added
from pipeline_engine.run.edges import Passage, edge_of, run_backward
from pipeline_engine.run.split import UNASKED, WeightPart, plan_split, run_input_part

StageFunction = Callable[..., Any]

with torch.inference_mode(False):
    ANCHOR = torch.zeros((), requires_grad=True, device="cpu")
"""The leaf behind every history that the engine gives a tensor; no gradient ever gets to it."""


class _Received(Passage):
    """Gives a received tensor a history: a non-leaf whose gradient ends in an entry, all uses summed.

    It comes there once, or more than once if a backward runs inside another, as a reentrant checkpoint's.

    The tensor comes in a list, so that autograd takes it for a fresh output and not for a view of an input: the
    stage may change it in place.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, entry: Entry, place: int, tensor: list[torch.Tensor]) -> torch.Tensor:
        ctx.entry, ctx.place = entry, place
        ctx.set_materialize_grads(False)
        return tensor.pop()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None, None]:
        arrived = ctx.entry.arrived
        arrived[ctx.place] = added(arrived[ctx.place], grads[0])
        return None, None, None, None


@frozen(eq=False)
class Entry:
    """Where the gradients of a received cargo come out.

    Attributes:
        arrived: for each leaf of the cargo the gradient that has come and was not taken yet.
        anchors: the leaf behind that history, if there is one: a backward that asks for it brings the gradients here.
    """

    arrived: list[torch.Tensor | None]
    anchors: tuple[torch.Tensor, ...]

    def take(self) -> Grads:
        """What the last backward brought."""
        grads = tuple(self.arrived)
        self.arrived[:] = [None] * len(grads)
        return grads


def receive(cargo: Cargo, *, differentiate: bool) -> tuple[Any, Entry]:
    """What a stage is called with in place of a cargo: its tree, with a history whose gradients end in an entry.

    The tensors of ``cargo`` are used up: it must not be read again.
    """
    arrived: list[torch.Tensor | None] = [None] * len(cargo.leaves)
    if not differentiate or not any(cargo.needs_grad):
        return cargo.tree(), Entry(arrived, ())
    entry = Entry(arrived, (ANCHOR,))
    leaves = [
        _Received.apply(ANCHOR, entry, place, [leaf]) if wanted else leaf
        for place, (leaf, wanted) in enumerate(zip(cargo.leaves, cargo.needs_grad, strict=True))
    ]
    return cargo.tree(leaves), entry


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
        run_backward(*self._roots(grads), retain_graph=retain_graph)
        return self._taken()

    def backward_input(self, grads: Grads, *, retain_graph: bool) -> tuple[tuple[Grads, ...], WeightPart]:
        """Run the first half of a split backward; returns the gradients of each argument, and the second half.

        What cannot be split runs whole, and the second half has nothing left to do; what nobody asks an input gradient
        of is left to the second half.
        """
        roots, root_grads = self._roots(grads)
        anchors = [anchor for entry in self.entries for anchor in entry.anchors]
        if not anchors:
            return self._taken(), WeightPart(UNASKED, roots, root_grads)
        split = plan_split(roots, anchors)
        if split.deferred:
            part = run_input_part(split, roots, root_grads, anchors)
        else:
            part = WeightPart(split)
            run_backward(roots, root_grads, retain_graph=retain_graph)
        return self._taken(), part

    def _roots(self, grads: Grads) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Exits that have a gradient, and the gradients."""
        roots: list[GradientEdge] = []
        root_grads: list[torch.Tensor] = []
        for root, grad in zip(self.exits, grads, strict=True):
            if root is not None and grad is not None:
                roots.append(root)
                root_grads.append(grad)
        return roots, root_grads

    def _taken(self) -> tuple[Grads, ...]:
        return tuple([entry.take() for entry in self.entries])


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
    arguments: list[Any] = []
    entries: list[Entry] = []
    for each in received:
        tree, entry = receive(each, differentiate=keep)
        arguments.append(tree)
        entries.append(entry)
    cargo, outputs = Cargo.with_leaves(stage(*arguments, *inputs, **shared))
    return cargo, Ran(tuple(entries), tuple(map(edge_of, outputs))) if keep else None
