"""A stage's work on one microbatch: a forward whose cut is invisible to autograd, and its backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import define, frozen

from pipeline_engine.run.cargo import Cargo, Grads, flatten

StageFunction = Callable[..., Any]


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


def receive(cargo: Cargo, *, differentiate: bool) -> tuple[Any, tuple[Tap, ...]]:
    """The tree of a cargo as a stage's argument, and a tap for each leaf.

    The tensors of ``cargo`` are used up: it must not be read again.
    """
    taps = tuple(Tap() for _ in cargo.leaves)
    if not differentiate or not any(cargo.needs_grad):
        return cargo.tree(), taps
    anchor = torch.zeros((), requires_grad=True)
    leaves = [
        _Received.apply(anchor, tap, [leaf]) if wanted else leaf  # type: ignore[no-untyped-call]
        for leaf, wanted, tap in zip(cargo.leaves, cargo.needs_grad, taps, strict=True)
    ]
    return cargo.tree(leaves), taps


@frozen(eq=False)
class Ran:
    """What a forward leaves behind for its backward.

    Attributes:
        taps: for each argument that was received, a tap for each of its leaves.
        outputs: leaves of what the stage returned; the tensors hold the graph.
    """

    taps: tuple[tuple[Tap, ...], ...]
    outputs: tuple[Any, ...]

    def backward(self, grads: Grads, *, retain_graph: bool) -> tuple[Grads, ...]:
        """Run the stage's backward; returns the gradients of each received argument."""
        for tap in (tap for taps in self.taps for tap in taps):
            tap.grad = None
        roots = [
            (output, grad)
            for output, grad in zip(self.outputs, grads, strict=True)
            if grad is not None and output.requires_grad
        ]
        if roots:
            outputs, output_grads = zip(*roots, strict=True)
            torch.autograd.backward(outputs, output_grads, retain_graph=retain_graph)
        return tuple(tuple(tap.grad for tap in taps) for taps in self.taps)


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
    cargo = Cargo.of(returned)
    if not keep:
        return cargo, None
    return cargo, Ran(tuple(taps for _, taps in arguments), tuple(flatten(returned)[0]))
