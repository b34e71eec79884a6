"""A split backward: the input gradients now, the gradients of large weights later, no work twice.

The backward of a matrix product makes two products, one for its input and one for its weight, and autograd computes
only those that are asked for.  So the first part asks for the input gradients and remembers what arrives at each
product whose weight is deferred; the second part starts from there and asks for those weights.  Every other node runs
in the first part only, together with the parameters that it leads to.

A weight is deferred if every way to it leads through one product that the first part runs anyway, with nothing between
the product and the weight but views.  Products under saved-tensor hooks (activation checkpointing, offloading) are
not deferred: their saved tensors would be computed twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

PRODUCTS = (
    "AddmmBackward0",
    "MmBackward0",
    "BmmBackward0",
    "BaddbmmBackward0",
    "LinearBackward0",
    "ConvolutionBackward0",
)
VIEWS = (
    "TBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ExpandBackward0",
)
REENTRANT = "CheckpointFunctionBackward"

_SAVED = "_raw_saved_"


Node = Any
"""A node of autograd's graph."""


@frozen(eq=False)
class Split:
    """How the backward of one graph is divided.

    Attributes:
        deferred: for each node that the second part runs once more, the weights that it runs for.
        at_once: the parameters of the first part.
        reason: why nothing is deferred; empty if something is.
    """

    deferred: Mapping[Node, tuple[torch.Tensor, ...]]
    at_once: tuple[torch.Tensor, ...]
    reason: str

    @property
    def summary(self) -> str:
        """What becomes of it, for a report."""
        if self.reason:
            return f"whole backward at once: {self.reason}"
        count = sum(len(weights) for weights in self.deferred.values())
        return f"{count} of {count + len(self.at_once)} parameters deferred"


@frozen(eq=False)
class WeightPart:
    """The second part of a backward: gradients that arrived at products, and the weights that wait for them."""

    split: Split
    arrived: dict[Node, tuple[torch.Tensor | None, ...]]

    def run(self, *, retain_graph: bool) -> None:
        """Accumulate the gradients of the deferred weights, as one backward does."""
        for node, weights in self.split.deferred.items():
            pairs = [
                (GradientEdge(node, n), grad) for n, grad in enumerate(self.arrived.get(node, ())) if grad is not None
            ]
            if pairs:
                edges, grads = zip(*pairs, strict=True)
                torch.autograd.backward(edges, grads, retain_graph=retain_graph, inputs=weights)


def run_input_part(
    split: Split, roots: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], anchors: Sequence[torch.Tensor]
) -> WeightPart:
    """Run the first part of a backward; what is left is returned.

    Args:
        split: of the graph of ``roots``; something is deferred.
        roots: outputs of a stage.
        grads: their gradients.
        anchors: leaves behind the received inputs; asking for them brings the gradients to the taps.
    """
    part = WeightPart(split, {})

    def remember(node: Node) -> RemovableHandle:
        handle: RemovableHandle = node.register_prehook(lambda arrived: part.arrived.__setitem__(node, arrived))
        return handle

    handles = [remember(node) for node in split.deferred]
    try:
        torch.autograd.backward(roots, grads, retain_graph=True, inputs=[*anchors, *split.at_once])
    finally:
        for handle in handles:
            handle.remove()
    return part


def plan_split(roots: Iterable[torch.Tensor], anchors: Sequence[torch.Tensor]) -> Split:
    """Find out which weights of a stage's graph can be deferred."""
    graph = _Graph.of(roots)
    if any(node.name() == REENTRANT for node in graph.nodes):
        return Split({}, (), "reentrant checkpointing cannot be split")
    leaves = {node: node.variable for node in graph.nodes if hasattr(node, "variable")}
    weights = {node for node, leaf in leaves.items() if not any(leaf is anchor for anchor in anchors)}
    product_of = {node: product for node in weights if (product := graph.only_product_before(node)) is not None}
    while stranded := graph.stranded(product_of, at_once=leaves.keys() - product_of.keys()):
        for node in stranded:
            del product_of[node]
    deferred: defaultdict[Node, tuple[torch.Tensor, ...]] = defaultdict(tuple)
    for node in (node for node in leaves if node in product_of):
        deferred[product_of[node]] += (leaves[node],)
    at_once = tuple(leaf for node, leaf in leaves.items() if node in weights and node not in product_of)
    return Split(deferred, at_once, "" if deferred else graph.why_nothing_is_deferred())


@frozen(eq=False)
class _Graph:
    """An autograd graph; ``nodes`` are ordered so that a node comes after all that its gradients flow to."""

    nodes: tuple[Node, ...]
    parents: Mapping[Node, list[Node]]

    @classmethod
    def of(cls, roots: Iterable[torch.Tensor]) -> _Graph:
        order: dict[Node, None] = {}
        parents: defaultdict[Node, list[Node]] = defaultdict(list)
        seen: set[Node] = set()
        stack: list[tuple[Node, bool]] = [(root.grad_fn, False) for root in roots if root.grad_fn is not None]
        while stack:
            node, is_left = stack.pop()
            if is_left:
                order[node] = None
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                for child, _ in node.next_functions:
                    if child is not None:
                        parents[child].append(node)
                        stack.append((child, False))
        return cls(tuple(order), parents)

    def why_nothing_is_deferred(self) -> str:
        if any(node.name() in PRODUCTS and not _is_product(node) for node in self.nodes):
            return "its matrix products are under saved-tensor hooks, as activation checkpointing sets them"
        return "no weight is used by exactly one matrix product"

    def only_product_before(self, leaf: Node) -> Node | None:
        """The one product through which every way to ``leaf`` leads; None if there is no such product."""
        found: set[Node] = set()
        above = list(self.parents[leaf])
        while above:
            node = above.pop()
            if _is_product(node):
                found.add(node)
            elif node.name() in VIEWS:
                above += self.parents[node]
            else:
                return None
        return found.pop() if len(found) == 1 else None

    def stranded(self, product_of: Mapping[Node, Node], at_once: Iterable[Node]) -> list[Node]:
        """Leaves whose product the first part would not run, since it leads to nothing else."""
        runs = set(at_once)
        for node in self.nodes:
            if any(child in runs for child, _ in node.next_functions):
                runs.add(node)
        return [leaf for leaf, product in product_of.items() if product not in runs]


def _is_product(node: Node) -> bool:
    if node.name() not in PRODUCTS:
        return False
    saved = (getattr(node, name) for name in dir(node) if name.startswith(_SAVED))
    return all(getattr(each, "unpack_hook", None) is None for each in saved)
