"""The wire format: how a cargo or its gradients become bytes and back.

    prefix       64 bytes: magic, kind, microbatch, length of the description, length of the second part
    description  padded to 64 bytes: structure, shapes, dtypes, which leaves want a gradient
    tensors      each padded to 64 bytes

A message is one part if it fits what the receiver can post without knowing it (``limit``).  Otherwise a bare prefix
announces the length of the second part, which is the message.  A notice of failure is one part that fits every
receive.
"""

from __future__ import annotations

import ctypes
import pickle
import struct
from collections.abc import Iterator
from typing import Any

import torch

from pipeline_engine.errors import TransportError
from pipeline_engine.run.cargo import ALIGNMENT, Cargo, Grads, aligned, flatten
from pipeline_engine.run.transports.base import Failure

FIRST_BYTES = 4096
"""What a receiver posts when it knows nothing of a message: room for a description and for small tensors."""

_PREFIX = struct.Struct("<4sBxxxQQQ")
_MAGIC = b"PIPE"
_CARGO, _GRADS, _FAILURE = range(3)
_Shape = tuple[torch.dtype, torch.Size] | None

assert _PREFIX.size <= ALIGNMENT


def encode_cargo(cargo: Cargo, microbatch: int, limit: int = FIRST_BYTES) -> tuple[torch.Tensor, ...]:
    """The parts of a cargo's message; tensors are copied, so that they may be changed afterwards."""
    shapes = [_shape(leaf) for leaf in cargo.leaves]
    constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in cargo.leaves]
    skeleton = cargo.tree(range(len(cargo.leaves)))
    description = pickle.dumps((skeleton, shapes, constants, cargo.needs_grad))
    tensors = [leaf for leaf in cargo.leaves if isinstance(leaf, torch.Tensor)]
    return _parts(_CARGO, microbatch, description, tensors, limit)


def encode_grads(grads: Grads, microbatch: int, limit: int) -> tuple[torch.Tensor, ...]:
    """The parts of a message with the gradients of a cargo; absent ones cost nothing."""
    description = pickle.dumps([_shape(grad) for grad in grads])
    return _parts(_GRADS, microbatch, description, [grad for grad in grads if grad is not None], limit)


def encode_failure(failure: Failure) -> torch.Tensor:
    """The only part of a notice of failure; texts are cut to what fits."""
    head = Failure(failure.rank, failure.doing[:200], failure.cause[:800], failure.traceback[-1600:])
    description = pickle.dumps(head)
    if ALIGNMENT + len(description) > FIRST_BYTES:  # letters of several bytes each
        description = pickle.dumps(Failure(failure.rank, failure.doing[:200], failure.cause[:200], ""))
    return _parts(_FAILURE, 0, description, [], FIRST_BYTES)[0]


def second_part_bytes(first: torch.Tensor) -> int:
    """Length of the second part that a first part announces; 0 if the first is the whole message."""
    return _prefix(first)[3]


def failure_in(message: torch.Tensor) -> Failure | None:
    """The failure that a message tells of, if it is a notice of failure."""
    kind, _, length, _ = _prefix(message)
    if kind != _FAILURE:
        return None
    failure = pickle.loads(_read(message, ALIGNMENT, length))
    assert isinstance(failure, Failure)
    return failure


def decode_cargo(message: torch.Tensor, microbatch: int) -> Cargo:
    """A cargo whose tensors live in the received bytes.

    Raises:
        TransportError: the message is not the one that was expected, or lies about its size.
    """
    skeleton, shapes, constants, needs_grad = _description(message, _CARGO, microbatch)
    tensors = _tensors(message, shapes)
    leaves = tuple(next(tensors) if shape else constant for shape, constant in zip(shapes, constants, strict=True))
    return Cargo(flatten(skeleton)[1], leaves, needs_grad)


def decode_grads(message: torch.Tensor, microbatch: int) -> Grads:
    """Gradients whose tensors live in the received bytes."""
    shapes = _description(message, _GRADS, microbatch)
    tensors = _tensors(message, shapes)
    return tuple(next(tensors) if shape else None for shape in shapes)


def _shape(leaf: Any) -> _Shape:
    return (leaf.dtype, leaf.shape) if isinstance(leaf, torch.Tensor) else None


def _parts(
    kind: int, microbatch: int, description: bytes, tensors: list[torch.Tensor], limit: int
) -> tuple[torch.Tensor, ...]:
    body = ALIGNMENT + aligned(len(description))
    total = body + sum(aligned(tensor.numel() * tensor.element_size()) for tensor in tensors)
    message = torch.empty(total, dtype=torch.uint8)
    _write(message, 0, _PREFIX.pack(_MAGIC, kind, microbatch, len(description), 0))
    _write(message, ALIGNMENT, description)
    for tensor in tensors:
        _place(message, body, tensor.dtype, tensor.shape).copy_(tensor)
        body += aligned(tensor.numel() * tensor.element_size())
    if total <= limit:
        return (message,)
    announcement = torch.empty(ALIGNMENT, dtype=torch.uint8)
    _write(announcement, 0, _PREFIX.pack(_MAGIC, kind, microbatch, 0, total))
    return (announcement, message)


def _write(buffer: torch.Tensor, offset: int, data: bytes) -> None:
    ctypes.memmove(buffer.data_ptr() + offset, data, len(data))


def _read(buffer: torch.Tensor, offset: int, length: int) -> bytes:
    if offset + length > buffer.numel():
        raise TransportError(f"a message of {buffer.numel()} bytes announces {length} bytes at {offset}.")
    return ctypes.string_at(buffer.data_ptr() + offset, length)


def _place(buffer: torch.Tensor, offset: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """A tensor in the memory of ``buffer`` that is no view to autograd, so that it may be changed in place."""
    tensor = torch.empty(0, dtype=dtype)
    if offset + shape.numel() * dtype.itemsize > buffer.numel():
        raise TransportError(f"a message of {buffer.numel()} bytes announces {dtype} {list(shape)} at {offset}.")
    return tensor.set_(buffer.untyped_storage(), offset // dtype.itemsize, shape)  # type: ignore[call-overload,no-any-return]


def _prefix(message: torch.Tensor) -> tuple[int, int, int, int]:
    magic, kind, microbatch, length, second = _PREFIX.unpack(_read(message, 0, _PREFIX.size))
    if magic != _MAGIC:
        raise TransportError(f"a message begins with {magic!r}, not with {_MAGIC!r}: the channel carries foreign data.")
    return kind, microbatch, length, second


def _description(message: torch.Tensor, kind: int, microbatch: int) -> Any:
    got, got_microbatch, length, _ = _prefix(message)
    if (got, got_microbatch) != (kind, microbatch):
        raise TransportError(
            f"a message of kind {got} for microbatch {got_microbatch} arrived where kind {kind} for microbatch "
            f"{microbatch} was expected."
        )
    return pickle.loads(_read(message, ALIGNMENT, length))


def _tensors(message: torch.Tensor, shapes: list[_Shape]) -> Iterator[torch.Tensor]:
    offset = ALIGNMENT + aligned(_prefix(message)[2])
    for shape in shapes:
        if shape is not None:
            tensor = _place(message, offset, *shape)
            yield tensor
            offset += aligned(tensor.numel() * tensor.element_size())
