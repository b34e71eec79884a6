"""A split backward: the input gradients now, the gradients of large weights later, no work twice.

The backward of a matrix product makes two products, one for its input and one for its weight, and only those that are
asked for.  So the first part asks for the input gradients and remembers what arrives at each product whose weight is
deferred; the second part has that product make the gradients of its weights.  Every other node runs in the first part
only, together with the parameters that it leads to.

A weight is deferred if every way to it leads through one product that the first part runs anyway, with nothing between
the product and the weight but views and casts.  Products under saved-tensor hooks (activation checkpointing,
offloading) are not deferred: their saved tensors would be computed twice.  Nor are those of custom functions, unless
they declare it: see ``pe.splits_backward``.

A stage none of whose received inputs wants a gradient, as the first one, has nothing to do in the first part: its whole
backward is the second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

import torch
from attrs import frozen
from torch.autograd.graph import GradientEdge

from pipeline_engine.run.edges import run_backward
from pipeline_engine.run.products import (
    Node,
    Product,
    is_custom,
    is_product,
    may_be_product,
    run_products,
    weight_edges,
)

VIEWS_AND_CASTS = (
    "TBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ExpandBackward0",
    "ToCopyBackward0",
)
REENTRANT = "CheckpointFunctionBackward"


@frozen(eq=False)
class Split:
    """How the backward of one graph is divided.

    Attributes:
        deferred: products whose weights are left for the second part.
        at_once: the parameters of the first part.
        summary: what becomes of it, for a report.
    """

    deferred: tuple[Product, ...]
    at_once: tuple[torch.Tensor, ...]
    summary: str


UNASKED = Split((), (), "whole backward in the second half: no gradient of an input is wanted")


@frozen(eq=False)
class WeightPart:
    """The second part of a backward.

    Attributes:
        split: with the products whose weights wait for it.
        roots, grads: where the gradients of the stage's outputs go in, and these, if the whole backward waits for it.
    """

    split: Split
    roots: Sequence[GradientEdge] = ()
    grads: Sequence[torch.Tensor] = ()

    def run(self, *, retain_graph: bool) -> None:
        """Accumulate the gradients that are left, as one backward does."""
        run_backward(self.roots, self.grads, retain_graph=retain_graph)
        if self.split.deferred:
            run_products(self.split.deferred, retain_graph=retain_graph)


def run_input_part(
    split: Split, roots: Sequence[GradientEdge], grads: Sequence[torch.Tensor], anchors: Sequence[torch.Tensor]
) -> WeightPart:
    """Run the first part of a backward; what is left is returned.

    Args:
        split: of the graph of ``roots``; something is deferred.
        roots: where the gradients of a stage's outputs go in.
        grads: these gradients.
        anchors: leaves behind the received inputs; asking for them brings the gradients to the entries.
    """
    with ExitStack() as stack:
        for product in split.deferred:
            stack.enter_context(product.waiting())
        run_backward(roots, grads, retain_graph=True, inputs=[*anchors, *split.at_once])
    return WeightPart(split)


def plan_split(roots: Sequence[GradientEdge], anchors: Sequence[torch.Tensor]) -> Split:
    """Find out which weights of a stage's graph can be deferred."""
    graph = _Graph.of(roots)
    if any(node.name() == REENTRANT for node in graph.nodes):
        return Split((), (), _at_once("reentrant checkpointing cannot be split"))
    leaves = {node: node.variable for node in graph.nodes if hasattr(node, "variable")}
    weights = {node for node, leaf in leaves.items() if not any(leaf is anchor for anchor in anchors)}
    ways = {node: way for node in weights if (way := graph.only_way_to(node)) is not None}
    while stranded := graph.stranded(ways, at_once=leaves.keys() - ways.keys()):
        for node in stranded:
            del ways[node]
    by_product: defaultdict[Node, list[Node]] = defaultdict(list)
    for node in (node for node in leaves if node in ways):
        by_product[ways[node].product].append(node)
    deferred = tuple(
        Product(product, tuple(sorted({ways[node].edge for node in nodes})), tuple(leaves[node] for node in nodes))
        for product, nodes in by_product.items()
    )
    at_once = tuple(leaf for node, leaf in leaves.items() if node in weights and node not in ways)
    if not deferred:
        return Split((), at_once, _at_once(graph.why_nothing_is_deferred(weights)))
    return Split(deferred, at_once, f"{len(ways)} of {len(ways) + len(at_once)} parameters deferred")


def _at_once(reason: str) -> str:
    return f"whole backward at once: {reason}"


@frozen
class _Way:
    """The last step of gradients on their way to a weight: an edge of a product."""

    product: Node
    edge: int


@frozen(eq=False)
class _Graph:
    """An autograd graph; ``nodes`` are ordered so that a node comes after all that its gradients flow to.

    ``parents`` are the nodes from which gradients come, with the number of their edge; ``entries`` get theirs from
    outside.
    """

    nodes: tuple[Node, ...]
    parents: Mapping[Node, list[tuple[Node, int]]]
    entries: frozenset[Node]

    @classmethod
    def of(cls, roots: Sequence[GradientEdge]) -> _Graph:
        order: dict[Node, None] = {}
        parents: defaultdict[Node, list[tuple[Node, int]]] = defaultdict(list)
        seen: set[Node] = set()
        entries = [root.node for root in roots]
        stack: list[tuple[Node, bool]] = [(node, False) for node in entries]
        while stack:
            node, is_left = stack.pop()
            if is_left:
                order[node] = None
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                for edge, (child, _) in enumerate(node.next_functions):
                    if child is not None:
                        parents[child].append((node, edge))
                        stack.append((child, False))
        return cls(tuple(order), parents, frozenset(entries))

    def why_nothing_is_deferred(self, weights: Iterable[Node]) -> str:
        if any(may_be_product(node) and not is_product(node) for node in self.nodes):
            return "its matrix products are under saved-tensor hooks, as activation checkpointing sets them"
        users = {parent for node in weights for parent, _ in self.parents[node]}
        if custom := sorted({node.name().removesuffix("Backward") for node in users if is_custom(node)}):
            return (
                f"{', '.join(custom)} makes all its gradients at once; a custom function may declare pe.splits_backward"
            )
        return "no weight is used by exactly one matrix product"

    def only_way_to(self, leaf: Node) -> _Way | None:
        """The one edge of the one product through which every way to ``leaf`` leads; None if there is none."""
        found: set[_Way] = set()
        below = [leaf]
        while below:
            node = below.pop()
            if node in self.entries:
                return None
            for parent, edge in self.parents[node]:
                if is_product(parent) and edge in weight_edges(parent):
                    found.add(_Way(parent, edge))
                elif parent.name() in VIEWS_AND_CASTS:
                    below.append(parent)
                else:
                    return None
        return found.pop() if len(found) == 1 else None

    def stranded(self, ways: Mapping[Node, _Way], at_once: Iterable[Node]) -> list[Node]:
        """Leaves whose product the first part would not run, since it leads to nothing else."""
        runs = set(at_once)
        for node in self.nodes:
            if any(child in runs for child, _ in node.next_functions):
                runs.add(node)
        return [leaf for leaf, way in ways.items() if way.product not in runs]
