"""Products: operations whose backward makes the gradients of inputs and of weights by separate work.

Torch's matrix products and convolutions compute only the gradients that are asked for.  A custom
``torch.autograd.Function`` says with ``splits_backward`` that it does so too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from attrs import define, field
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeline_engine.errors import UsageError
from pipeline_engine.run.edges import ask_for, run_backward

Node = Any
"""A node of autograd's graph."""

F = TypeVar("F", bound=type[torch.autograd.Function])

_PRODUCTS = (
    "AddmmBackward0",
    "MmBackward0",
    "BmmBackward0",
    "BaddbmmBackward0",
    "LinearBackward0",
    "ConvolutionBackward0",
)


def splits_backward(*, weights: Collection[int]) -> Callable[[F], F]:
    """Declare that a custom function's backward can be split, for schedules with backwards in two halves.

        @pe.splits_backward(weights=[1])
        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight): ...

            @staticmethod
            def backward(ctx, grad):
                x, weight = ctx.saved_tensors
                grad_x = grad @ weight.T if ctx.needs_input_grad[0] else None
                grad_weight = x.T @ grad if ctx.needs_input_grad[1] else None
                return grad_x, grad_weight

    Its backward is called once for each half, with the same gradients; ``ctx.needs_input_grad`` tells what is wanted.
    Without this declaration a custom function runs once, in the first half.

    Args:
        weights: positions among the arguments of ``apply`` of the tensors whose gradients may come later.

    Raises:
        UsageError: no weight is named.
    """
    if not weights:
        raise UsageError(
            "splits_backward: name at least one position of a weight, for example @pe.splits_backward(weights=[1])."
        )

    def declare(function: F) -> F:
        whole: Any = function.backward

        def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
            if keep := getattr(ctx, "_keep", None):
                keep(grads)
            return whole(ctx, *grads)

        function.backward = staticmethod(backward)  # type: ignore[method-assign]
        function._later = frozenset(weights)  # type: ignore[attr-defined]
        return function

    return declare


def is_product(node: Node) -> bool:
    """Whether the gradients of ``node``'s weights can be made later, without doing any work twice."""
    return bool(_later(node)) or (may_be_product(node) and not _is_under_hooks(node))


def may_be_product(node: Node) -> bool:
    """Whether ``node`` is a product of torch; under saved-tensor hooks its saved tensors would be made twice."""
    return node.name() in _PRODUCTS


def is_custom(node: Node) -> bool:
    """Whether ``node`` is of a custom function that does not say how to split it."""
    return hasattr(node, "_forward_cls") and not _later(node)


def weight_edges(node: Node) -> Collection[int]:
    """Which of the edges of a product may lead to weights."""
    later = _later(node)
    if not later:
        return range(len(node.next_functions))
    return [edge for edge, argument in _arguments(node).items() if argument in later]


@define(eq=False)
class Product:
    """A product of one graph whose weights wait for the second part of the backward.

    Attributes:
        node: of the graph.
        edges: those of the node that lead to the weights.
        weights: the parameters.
    """

    node: Node
    edges: tuple[int, ...]
    weights: tuple[torch.Tensor, ...]
    _arrived: Sequence[torch.Tensor | None] = field(init=False, default=())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While the first part runs: keep what arrives, and have a custom function leave the weights out."""
        if not self.is_declared:
            handle = self.node.register_prehook(self._keep)
            try:
                yield
            finally:
                handle.remove()
            return
        self.node._keep = self._keep
        try:
            with self._asking(first=True):
                yield
        finally:
            self.node._keep = None

    def run(self, *, retain_graph: bool) -> None:
        """Accumulate the weights' gradients; see ``run_products``."""
        if all(grad is None for grad in self._arrived):
            return
        made = self._made_later() if self.is_declared else self.node(*self._arrived)
        self._arrived = ()
        pairs = [(self.edge(edge), grad) for edge in self.edges if (grad := made[edge]) is not None]
        if pairs:
            edges, grads = [edge for edge, _ in pairs], [_fitted(grad, edge) for edge, grad in pairs]
            run_backward(edges, grads, retain_graph=retain_graph, inputs=self.weights)

    @property
    def is_declared(self) -> bool:
        """Whether the node is of a custom function, see ``splits_backward``, and not of torch."""
        return bool(_later(self.node))

    def edge(self, number: int) -> GradientEdge:
        """Where the gradient that the node makes for one of its arguments goes."""
        return GradientEdge(*self.node.next_functions[number])

    def _keep(self, grads: Sequence[torch.Tensor | None]) -> None:
        self._arrived = grads

    def _made_later(self) -> dict[int, torch.Tensor | None]:
        """By edge."""
        with self._asking(first=False), torch.no_grad():
            made = self.node._forward_cls.backward(self.node, *self._arrived)
        every = made if isinstance(made, tuple) else (made,)
        return {edge: every[argument] for edge, argument in _arguments(self.node).items()}

    @contextmanager
    def _asking(self, *, first: bool) -> Iterator[None]:
        """Have a custom function asked for the gradients of one part only."""
        every, arguments = self.node.needs_input_grad, _arguments(self.node)
        later = {arguments[edge] for edge in self.edges}
        self.node.needs_input_grad = tuple(needed and ((place in later) != first) for place, needed in enumerate(every))
        try:
            yield
        finally:
            self.node.needs_input_grad = every


def run_products(products: Sequence[Product], *, retain_graph: bool) -> None:
    """Accumulate the gradients of all weights of ``products``.

    The nodes themselves are called: their hooks have fired in the first part.
    """
    _run_each([product for product in products if product.is_declared], retain_graph=retain_graph)
    if of_torch := [product for product in products if not product.is_declared]:
        _run_within_backward(of_torch, retain_graph=retain_graph)


def _run_within_backward(products: Sequence[Product], *, retain_graph: bool) -> None:
    """A node of torch makes what the backward asks for within which it is called.

    So they are called from a hook of one that asks for nothing but the weights' edges.
    """
    origin = torch.zeros((), requires_grad=True, device="cpu")
    with torch.enable_grad():
        trigger = origin * 1
    assert trigger.grad_fn is not None
    trigger.grad_fn.register_prehook(lambda _: _run_each(products, retain_graph=retain_graph))
    asked = [product.edge(edge) for product in products for edge in product.edges]
    ask_for([get_gradient_edge(origin), *asked], trigger)


def _run_each(products: Sequence[Product], *, retain_graph: bool) -> None:
    for product in products:
        product.run(retain_graph=retain_graph)


def _later(node: Node) -> frozenset[int]:
    return getattr(getattr(node, "_forward_cls", None), "_later", frozenset())


def _arguments(node: Node) -> dict[int, int]:
    """For each edge of a custom function that leads anywhere, the argument of ``apply`` that it belongs to."""
    edges = [edge for edge, (child, _) in enumerate(node.next_functions) if child is not None]
    arguments = [place for place, needed in enumerate(node.needs_input_grad) if needed]
    return dict(zip(edges, arguments, strict=True))


def _is_under_hooks(node: Node) -> bool:
    saved = (getattr(node, name) for name in _saved_by(node.__class__))
    return any(getattr(each, "unpack_hook", None) is not None for each in saved)


@cache
def _saved_by(kind: type) -> tuple[str, ...]:
    """What nodes of a kind save; asking for it is slow."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _fitted(grad: torch.Tensor, edge: GradientEdge) -> torch.Tensor:
    """As autograd does between two nodes: summed to the shape and cast to the type of what it is the gradient of."""
    wanted = edge.node._input_metadata[edge.output_nr]
    if grad.shape == wanted.shape and grad.dtype == wanted.dtype:
        return grad
    return grad.sum_to_size(wanted.shape).to(wanted.dtype)
