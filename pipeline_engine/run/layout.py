"""Layout: what a receiver must know of a cargo before it can read it.

A model's layouts repeat, microbatch after microbatch, so their bytes are made and understood once and remembered.
"""

from __future__ import annotations

import pickle
from functools import lru_cache
from typing import Any

import torch
from attrs import frozen
from torch.utils._pytree import TreeSpec

from pipeline_engine.run.cargo import Cargo, flatten

Shape = tuple[torch.dtype, torch.Size, tuple[int, ...] | None]
"""Dtype, sizes and strides of a tensor; no strides if it is contiguous."""

_REMEMBERED = 4096  # layouts; microbatches that differ in their number of rows have different ones
_PLAIN, _WITH_CONSTANTS = b"\0", b"\1"


@frozen(cache_hash=True)
class Layout:
    """Structure, shapes and dtypes of a cargo, and its leaves that are no tensors.

    Attributes:
        spec: structure of the tree.
        places: for each place of the tree the number of its leaf.
        shapes: for each leaf its shape, or None if it is no tensor.
        needs_grad: for each leaf whether its gradient is wanted back.
        random_shapes: of the states of random generators that travel along.
        constants: for each leaf its value, or None if it is a tensor.
    """

    spec: TreeSpec
    places: tuple[int, ...]
    shapes: tuple[Shape | None, ...]
    needs_grad: tuple[bool, ...]
    random_shapes: tuple[Shape, ...]
    constants: tuple[Any, ...]

    @classmethod
    def of(cls, cargo: Cargo) -> Layout:
        """The layout of a cargo."""
        return cls(
            cargo.spec,
            cargo.places,
            tuple(shape_of(leaf) for leaf in cargo.leaves),
            cargo.needs_grad,
            tuple((state.dtype, state.shape, None) for state in cargo.randomness),
            tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in cargo.leaves),
        )

    def to_bytes(self) -> bytes:
        """What ``from_bytes`` understands."""
        if any(constant is not None for constant in self.constants):
            return _WITH_CONSTANTS + _packed(self)  # they may be of any type, also one that cannot be looked up
        return _PLAIN + _packed_once(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Layout:
        """The layout again; constants are fresh objects each time."""
        return _unpacked(data[1:]) if data[:1] == _WITH_CONSTANTS else _unpacked_once(data[1:])


def shape_of(leaf: Any) -> Shape | None:
    """The shape of a tensor; None for anything else."""
    return (leaf.dtype, leaf.shape, strides_of(leaf)) if isinstance(leaf, torch.Tensor) else None


def strides_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Strides that keep the order of the dimensions in memory, without gaps; None for a contiguous tensor."""
    return None if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def _packed(layout: Layout) -> bytes:
    return pickle.dumps(
        (
            _skeleton(layout),
            layout.places,
            layout.shapes,
            layout.needs_grad,
            layout.random_shapes,
            layout.constants,
        )
    )


def _unpacked(data: bytes) -> Layout:
    skeleton, *rest = pickle.loads(data)
    return Layout(skeleton if isinstance(skeleton, TreeSpec) else flatten(skeleton)[1], *rest)


_packed_once = lru_cache(_REMEMBERED)(_packed)
_unpacked_once = lru_cache(_REMEMBERED)(_unpacked)


def _skeleton(layout: Layout) -> Any:
    """What tells the structure: the tree with numbers for leaves, or its spec if the tree does not take numbers."""
    cargo = Cargo(layout.spec, layout.places, tuple(range(len(layout.shapes))), layout.needs_grad)
    try:
        return cargo.tree()
    except Exception:  # a dataclass that checks its fields may raise anything
        return layout.spec
