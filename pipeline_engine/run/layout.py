"""Layout: what a receiver must know of a message before it can read it, and where its tensors stand.

A model's layouts repeat, microbatch after microbatch, so they are worked out and understood once and remembered.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from attrs import field, frozen
from torch.utils._pytree import TreeSpec

from pipeline_engine.run.cargo import ALIGNMENT, Cargo, Grads, aligned, flatten

Shape: TypeAlias = tuple[torch.dtype, torch.Size, tuple[int, ...] | None]
"""Dtype, sizes and strides of a tensor; no strides if it is contiguous."""

_REMEMBERED = 4096  # layouts; microbatches that differ in their number of rows have different ones
_PLAIN, _WITH_CONSTANTS = b"\0", b"\1"


@frozen(eq=False)
class Layout:
    """A description, and the places of the tensors that stand behind it.

    Attributes:
        description: in bytes.
        padded_description: as it travels, up to where the first tensor may start.
        tensors: the shape of each tensor, its place in bytes from the beginning of the message, and its size in bytes.
        total: bytes of the whole message.
    """

    description: bytes
    _present: Sequence[Shape]
    padded_description: bytes = field(init=False)
    tensors: tuple[tuple[Shape, int, int], ...] = field(init=False)
    total: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        padded = self.description.ljust(aligned(len(self.description)), b"\0")
        place, tensors = ALIGNMENT + len(padded), []
        for shape in self._present:
            size = shape[1].numel() * shape[0].itemsize
            tensors.append((shape, place, size))
            place += aligned(size)
        object.__setattr__(self, "padded_description", padded)
        object.__setattr__(self, "tensors", tuple(tensors))
        object.__setattr__(self, "total", place)


@frozen(eq=False)
class CargoLayout(Layout):
    """The layout of a cargo: its structure, and its leaves that are no tensors.

    Attributes:
        spec, places, needs_grad: those of the cargo.
        shapes: for each leaf its shape, or None if it is no tensor.
        constants: for each leaf its value, or None if it is a tensor.
    """

    spec: TreeSpec
    places: tuple[int, ...]
    shapes: tuple[Shape | None, ...]
    needs_grad: tuple[bool, ...]
    constants: tuple[Any, ...]


@frozen(eq=False)
class GradsLayout(Layout):
    """The layout of gradients; ``shapes`` has None for each that is absent."""

    shapes: tuple[Shape | None, ...]


def layout_of_cargo(cargo: Cargo) -> CargoLayout:
    """The layout of a cargo."""
    shapes = _shapes_of(cargo.leaves)
    random_shapes = _present(_shapes_of(cargo.randomness)) if cargo.randomness else ()
    if None not in shapes:
        return _without_constants(cargo.spec, cargo.places, shapes, cargo.needs_grad, random_shapes)
    # Constants may be of any type, also one that cannot be looked up.
    constants = tuple([None if isinstance(leaf, torch.Tensor) else leaf for leaf in cargo.leaves])
    return _described(_WITH_CONSTANTS, cargo.spec, cargo.places, shapes, cargo.needs_grad, random_shapes, constants)


def layout_of_grads(grads: Grads) -> GradsLayout:
    """The layout of gradients."""
    return _of_grads(_shapes_of(grads))


def read_layout(description: bytes) -> CargoLayout:
    """The layout of a cargo again; constants are fresh objects each time."""
    return _read(description) if description[:1] == _WITH_CONSTANTS else _read_once(description)


@lru_cache(_REMEMBERED)
def read_grads_layout(description: bytes) -> GradsLayout:
    """The layout of gradients again."""
    shapes = pickle.loads(description)
    return GradsLayout(description, _present(shapes), shapes)


def _shapes_of(leaves: Iterable[Any]) -> tuple[Shape | None, ...]:
    """The shape of each leaf that is a tensor; strides keep the order of its dimensions in memory, without gaps."""
    shapes: list[Shape | None] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            strides = None if leaf.is_contiguous() else torch.empty_like(leaf, device="meta").stride()
            shapes.append((leaf.dtype, leaf.shape, strides))
        else:
            shapes.append(None)
    return tuple(shapes)


def _present(shapes: Sequence[Shape | None]) -> tuple[Shape, ...]:
    return tuple(shape for shape in shapes if shape is not None)


@lru_cache(_REMEMBERED)
def _of_grads(shapes: tuple[Shape | None, ...]) -> GradsLayout:
    return GradsLayout(pickle.dumps(shapes), _present(shapes), shapes)


@lru_cache(_REMEMBERED)
def _without_constants(
    spec: TreeSpec,
    places: tuple[int, ...],
    shapes: tuple[Shape | None, ...],
    needs_grad: tuple[bool, ...],
    random_shapes: tuple[Shape, ...],
) -> CargoLayout:
    return _described(_PLAIN, spec, places, shapes, needs_grad, random_shapes, (None,) * len(shapes))


def _described(
    kind: bytes,
    spec: TreeSpec,
    places: tuple[int, ...],
    shapes: tuple[Shape | None, ...],
    needs_grad: tuple[bool, ...],
    random_shapes: tuple[Shape, ...],
    constants: tuple[Any, ...],
) -> CargoLayout:
    skeleton = _skeleton(spec, places, len(shapes))
    description = kind + pickle.dumps((skeleton, places, shapes, needs_grad, random_shapes, constants))
    return CargoLayout(description, (*_present(shapes), *random_shapes), spec, places, shapes, needs_grad, constants)


def _read(description: bytes) -> CargoLayout:
    skeleton, places, shapes, needs_grad, random_shapes, constants = pickle.loads(description[1:])
    spec = skeleton if isinstance(skeleton, TreeSpec) else flatten(skeleton)[1]
    return CargoLayout(description, (*_present(shapes), *random_shapes), spec, places, shapes, needs_grad, constants)


_read_once = lru_cache(_REMEMBERED)(_read)


def _skeleton(spec: TreeSpec, places: tuple[int, ...], num_leaves: int) -> Any:
    """What tells the structure: the tree with numbers for leaves, or its spec if the tree does not take numbers."""
    cargo = Cargo(spec, places, tuple(range(num_leaves)), (False,) * num_leaves)
    try:
        return cargo.tree()
    except Exception:  # a dataclass that checks its fields may raise anything
        return spec
