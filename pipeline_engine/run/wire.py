"""The wire format: how a cargo or its gradients become bytes and back.

    prefix       64 bytes: magic, kind, number of parts, checksum, call, microbatch, lengths, place on its channel
    description  padded to 64 bytes: structure, shapes, dtypes, which leaves want a gradient
    tensors      each padded to 64 bytes
    tail         8 bytes: channel and place once more, so that a message whose end is missing is noticed

A message is one part if it fits what the receiver can post without knowing it (``limit``).  Otherwise a bare prefix
announces the length of the second part, which is the message.  A notice of failure is one part that fits every
receive.
"""

from __future__ import annotations

import ctypes
import pickle
import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from attrs import frozen

from pipeline_engine.errors import TransportError
from pipeline_engine.plan.values import Channel
from pipeline_engine.run.cargo import ALIGNMENT, Cargo, Grads
from pipeline_engine.run.layout import Layout, Shape, layout_of_cargo, layout_of_grads, read_grads_layout, read_layout
from pipeline_engine.run.transports.base import Failure

FIRST_BYTES = 16 * 1024
"""What a receiver posts when it knows nothing of a message: room for a description and for small tensors."""

_PREFIX = struct.Struct("<4sBBBxIQQQQQ12x")
_PLACE, _PLACE_AT = struct.Struct("<Q"), 44  # in the prefix, but written when it is known
_TAIL = struct.Struct("<II")  # in an announcement it lies in the padding of the prefix
_MAGIC = b"PIPE"
_CARGO, _GRADS, _FAILURE = range(3)

assert _PREFIX.size == ALIGNMENT


@frozen
class Stamp:
    """What a message belongs to; the receiver must expect the same.

    Attributes:
        microbatch, call: numbers.
        verify: whether the sender adds a checksum, which the receiver then checks.
    """

    microbatch: int
    call: int = 0
    verify: bool = False


def encode_cargo(cargo: Cargo, stamp: Stamp, limit: int = FIRST_BYTES) -> tuple[torch.Tensor, ...]:
    """The parts of a cargo's message; tensors are copied, so that they may be changed afterwards."""
    tensors = [leaf for leaf in (*cargo.leaves, *cargo.randomness) if isinstance(leaf, torch.Tensor)]
    return _parts(_CARGO, stamp, layout_of_cargo(cargo), tensors, limit)


def encode_grads(grads: Grads, stamp: Stamp, limit: int) -> tuple[torch.Tensor, ...]:
    """The parts of a message with the gradients of a cargo; absent ones cost nothing."""
    return _parts(_GRADS, stamp, layout_of_grads(grads), [grad for grad in grads if grad is not None], limit)


def encode_failure(failure: Failure) -> torch.Tensor:
    """The only part of a notice of failure; texts are cut to what fits."""
    head = Failure(failure.rank, failure.doing[:200], failure.cause[:800], failure.traceback[-1600:])
    description = pickle.dumps(head)
    if ALIGNMENT + len(description) > FIRST_BYTES:  # letters of several bytes each
        description = pickle.dumps(Failure(failure.rank, failure.doing[:200], failure.cause[:200], ""))
    return _parts(_FAILURE, Stamp(0), Layout(description, ()), [], FIRST_BYTES)[0]


def mark_place(parts: Sequence[torch.Tensor], channel: Channel, place: int) -> None:
    """Write into each part which message of its channel it is, counted from 0: into its prefix, and at its end."""
    tail = _tail(channel, place)
    for part in parts:
        _write(part, _PLACE_AT, _PLACE.pack(place))
        _write(part, part.numel() - _TAIL.size, tail)


def check_place(part: torch.Tensor, channel: Channel, place: int) -> None:
    """Raise TransportError unless it is this message of its channel, to its end."""
    prefix = _prefix(part)
    if prefix.place != place:
        raise TransportError(
            f"message {prefix.place} of a channel arrived where message {place} was expected: one was lost, or came "
            "twice."
        )
    end = ALIGNMENT if prefix.parts == 2 else prefix.total + _TAIL.size
    if _read(part, end - _TAIL.size, _TAIL.size) != _tail(channel, place):
        raise TransportError(f"message {place} of channel {channel} arrived without its end: it was cut short.")


def _tail(channel: Channel, place: int) -> bytes:
    """Other channels are told apart: what stood in the memory of a receive may be a message of one of them."""
    return _TAIL.pack(_number_of(channel), place & 0xFFFFFFFF)


@lru_cache(4096)
def _number_of(channel: Channel) -> int:
    return zlib.crc32(str(channel).encode())


def second_part_bytes(first: torch.Tensor) -> int:
    """Length of the second part that a first part announces; 0 if the first is the whole message.

    Raises:
        PeerFailedError: it is a notice of failure.
    """
    prefix = _prefix(first)
    if prefix.kind == _FAILURE:
        raise _failure(first, prefix).as_error()
    return prefix.total + _TAIL.size if prefix.parts == 2 else 0


def failure_in(message: torch.Tensor) -> Failure | None:
    """The failure that a message tells of, if it is a notice of failure."""
    prefix = _prefix(message)
    return _failure(message, prefix) if prefix.kind == _FAILURE else None


def _failure(message: torch.Tensor, prefix: _Prefix) -> Failure:
    failure = pickle.loads(_read(message, ALIGNMENT, prefix.length))
    assert isinstance(failure, Failure)
    return failure


def decode_cargo(message: torch.Tensor, stamp: Stamp) -> Cargo:
    """A cargo whose tensors live in the received bytes.

    Raises:
        TransportError: the message is not the one that was expected, or lies about its size.
    """
    layout = read_layout(_description(message, _CARGO, stamp))
    tensors = iter(_tensors(message, layout))
    leaves = [
        next(tensors) if shape else constant for shape, constant in zip(layout.shapes, layout.constants, strict=True)
    ]
    return Cargo(layout.spec, layout.places, tuple(leaves), layout.needs_grad, tuple(tensors))


def decode_grads(message: torch.Tensor, stamp: Stamp) -> Grads:
    """Gradients whose tensors live in the received bytes."""
    layout = read_grads_layout(_description(message, _GRADS, stamp))
    tensors = iter(_tensors(message, layout))
    return tuple([next(tensors) if shape else None for shape in layout.shapes])


def _parts(
    kind: int, stamp: Stamp, layout: Layout, tensors: list[torch.Tensor], limit: int
) -> tuple[torch.Tensor, ...]:
    message = torch.empty(layout.total + _TAIL.size, dtype=torch.uint8)
    for (shape, place), tensor in zip(layout.tensors, tensors, strict=True):
        _place(message, place, shape).copy_(tensor)
    description, checksum = layout.description, 0
    if stamp.verify:
        _write(message, ALIGNMENT, description)
        checksum = _checksum(message, layout.total)
    rest = (checksum, stamp.call, stamp.microbatch, len(description), layout.total, 0)
    _write(message, 0, _PREFIX.pack(_MAGIC, kind, 1, stamp.verify, *rest) + description)
    if message.numel() <= limit:
        return (message,)
    announcement = torch.empty(ALIGNMENT, dtype=torch.uint8)
    _write(announcement, 0, _PREFIX.pack(_MAGIC, kind, 2, stamp.verify, *rest))
    return (announcement, message)


def _checksum(message: torch.Tensor, total: int) -> int:
    """Of all bytes between prefix and tail."""
    return zlib.crc32(_read(message, ALIGNMENT, total - ALIGNMENT))


def _write(buffer: torch.Tensor, offset: int, data: bytes) -> None:
    ctypes.memmove(buffer.data_ptr() + offset, data, len(data))


def _read(buffer: torch.Tensor, offset: int, length: int) -> bytes:
    if offset + length > buffer.numel():
        raise TransportError(f"a message of {buffer.numel()} bytes announces {length} bytes at {offset}.")
    return ctypes.string_at(buffer.data_ptr() + offset, length)


def _place(message: torch.Tensor, place: int, shape: Shape) -> torch.Tensor:
    """A tensor in the memory of ``message`` that is no view to autograd, so that it may be changed in place."""
    dtype, sizes, strides = shape
    tensor = torch.empty(0, dtype=dtype)
    return tensor.set_(message.untyped_storage(), place // dtype.itemsize, sizes, strides or ())


class _Prefix(NamedTuple):
    kind: int
    parts: int
    is_verified: int
    checksum: int
    call: int
    microbatch: int
    length: int
    total: int
    place: int


def _prefix(message: torch.Tensor) -> _Prefix:
    magic, *fields = _PREFIX.unpack(_read(message, 0, _PREFIX.size))
    if magic != _MAGIC:
        raise TransportError(f"a message begins with {magic!r}, not with {_MAGIC!r}: the channel carries foreign data.")
    return _Prefix(*fields)


def _description(message: torch.Tensor, kind: int, stamp: Stamp) -> bytes:
    prefix = _prefix(message)
    got, wanted = (prefix.kind, prefix.call, prefix.microbatch), (kind, stamp.call, stamp.microbatch)
    if got != wanted:
        raise TransportError(
            "a message of kind {} of call {} for microbatch {} arrived where one of ".format(*got)
            + "kind {} of call {} for microbatch {} was expected.".format(*wanted)
        )
    if prefix.total > message.numel():
        raise TransportError(f"a message of {message.numel()} bytes arrived where {prefix.total} bytes were announced.")
    if prefix.is_verified and _checksum(message, prefix.total) != prefix.checksum:
        raise TransportError(
            f"the checksum of a message for microbatch {stamp.microbatch} is wrong: bytes were changed."
        )
    return _read(message, ALIGNMENT, prefix.length)


def _tensors(message: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    if layout.total > message.numel():
        raise TransportError(
            f"a message of {message.numel()} bytes announces tensors of {layout.total} bytes in all: "
            + ", ".join(f"{dtype} {list(sizes)}" for (dtype, sizes, _), _ in layout.tensors)
        )
    return [_place(message, place, shape) for shape, place in layout.tensors]
