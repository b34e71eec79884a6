"""Cargo: a tree of tensors without its autograd history, as it crosses a cut between stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch.utils import _pytree as pytree

from pipeline_engine.errors import UsageError


@frozen(eq=False)
class Cargo:
    """Leaves and structure of a tree.

    A tensor that stands in several places of the tree is one leaf and arrives as one tensor.  Different tensors that
    share memory arrive with memory of their own, in the order of dimensions that it had, without gaps and repetitions.

    Attributes:
        spec: structure of the tree.
        places: for each place of the tree the number of its leaf.
        leaves: detached tensors, and constants of any picklable type.
        needs_grad: for each leaf whether its gradient is wanted back.
        randomness: states of random generators that travel along; usually none.
    """

    spec: pytree.TreeSpec
    places: tuple[int, ...]
    leaves: tuple[Any, ...]
    needs_grad: tuple[bool, ...]
    randomness: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, tree: Any) -> Cargo:
        """Detach a tree; the tensors still share their memory with it."""
        return cls.with_leaves(tree)[0]

    @classmethod
    def with_leaves(cls, tree: Any) -> tuple[Cargo, tuple[Any, ...]]:
        """Detach a tree; the second is its own leaves, whose tensors have their history."""
        every, spec = flatten(tree)
        leaves, places = distinct(every)
        return cls(spec, places, tuple(map(_detached, leaves)), tuple(map(_needs_grad, leaves))), leaves

    def tree(self, leaves: Sequence[Any] | None = None) -> Any:
        """The tree again, with ``leaves`` in the place of its own if given."""
        if self.spec is _LEAF:
            return (self.leaves if leaves is None else leaves)[0]
        own = self.leaves if leaves is None else leaves
        return pytree.tree_unflatten([own[place] for place in self.places], self.spec)

    def copied(self) -> Cargo:
        """The same with fresh memory."""
        leaves = tuple([_copied(leaf) for leaf in self.leaves])
        return Cargo(self.spec, self.places, leaves, self.needs_grad, self.randomness)

    @property
    def grad_bytes(self) -> int:
        """Size in bytes of the gradients of all leaves that want one."""
        size = 0
        for leaf, is_wanted in zip(self.leaves, self.needs_grad, strict=True):
            size += aligned(leaf.nbytes) if is_wanted else 0
        return size


Grads = tuple[torch.Tensor | None, ...]
"""For each leaf of a cargo its gradient, or None."""


def added(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of two gradients of one leaf, of which either may be absent."""
    if left is None or right is None:
        return right if left is None else left
    return left + right


ALIGNMENT = 64


def aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up to where the next tensor may start."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure of a tree of tuples, lists, dicts, dataclasses, tensors and constants."""
    if isinstance(tree, torch.Tensor):
        return [tree], _LEAF
    while True:
        leaves, spec = pytree.tree_flatten(tree)
        if not any(_learn_dataclass(type(leaf)) for leaf in leaves):
            return leaves, spec


_LEAF = pytree.tree_flatten(0)[1]


def distinct(every: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Leaves without the repetitions of a tensor, and for each place the number of its leaf."""
    if len(every) == 1:
        return (every[0],), (0,)
    leaves: list[Any] = []
    places: list[int] = []
    known: dict[int, int] = {}
    for leaf in every:
        place = len(leaves)
        if isinstance(leaf, torch.Tensor):
            place = known.setdefault(id(leaf), place)
        if place == len(leaves):
            leaves.append(leaf)
        places.append(place)
    return tuple(leaves), tuple(places)


def _learn_dataclass(kind: type) -> bool:
    if not dataclasses.is_dataclass(kind) or kind in pytree.SUPPORTED_NODES:
        return False
    pytree.register_dataclass(kind)
    return True


def _detached(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.layout is not torch.strided or leaf.is_nested or hasattr(type(leaf), "to_local"):
        kind = type(leaf).__name__ if type(leaf) is not torch.Tensor else f"tensor of layout {leaf.layout}"
        raise UsageError(
            f"a stage returned a {kind}; only plain dense tensors travel between stages: return those that it is made "
            "of (for a DTensor: to_local()), and make it again in the next stage."
        )
    return leaf.detach()


def _needs_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
