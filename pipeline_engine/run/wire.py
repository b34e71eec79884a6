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
import sys
import zlib
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from attrs import frozen

from pipeline_engine.errors import TransportError
from pipeline_engine.plan.values import Channel
from pipeline_engine.run.cargo import ALIGNMENT, Cargo, Grads, aligned
from pipeline_engine.run.layout import Layout, Shape, layout_of_cargo, layout_of_grads, read_grads_layout, read_layout
from pipeline_engine.run.transports.base import SMALL, Failure, Message

FIRST_BYTES = 16 * 1024
"""What a receiver posts when it knows nothing of a message: room for a description and for small tensors."""

_PREFIX = struct.Struct("<4sBBBxIQQQQQ12x")
_TAIL = struct.Struct("<II")  # in an announcement it lies in the padding of the prefix
_MEMORY = ctypes.c_uint8 * 2**46  # of any length: ctypes keeps an array type for every length it ever saw
_MAGIC = b"PIPE"
_CARGO, _GRADS, _FAILURE = range(3)
assert _PREFIX.size == ALIGNMENT


@frozen
class Stamp:
    """What a message is, as its receiver knows it before it comes.

    Attributes:
        microbatch, call: numbers.
        verify: whether the sender adds a checksum, which the receiver then checks.
        channel: ``number_of`` the channel.
        place: which message of its channel it is, counted from 0.
    """

    microbatch: int
    call: int = 0
    verify: bool = False
    channel: int = 0
    place: int = 0


@lru_cache(4096)
def number_of(channel: Channel) -> int:
    """A number that tells channels apart: what stood in the memory of a receive may be a message of another one."""
    return zlib.crc32(str(channel).encode())


def encode_cargo(cargo: Cargo, stamp: Stamp, limit: int = FIRST_BYTES) -> tuple[Message, ...]:
    """The parts of a cargo's message; tensors are copied, so that they may be changed afterwards."""
    tensors = [leaf for leaf in (*cargo.leaves, *cargo.randomness) if isinstance(leaf, torch.Tensor)]
    return _parts(_CARGO, stamp, layout_of_cargo(cargo), tensors, limit)


def encode_grads(grads: Grads, stamp: Stamp, limit: int) -> tuple[Message, ...]:
    """The parts of a message with the gradients of a cargo, as ``encode_cargo``; absent ones cost nothing."""
    return _parts(_GRADS, stamp, layout_of_grads(grads), [grad for grad in grads if grad is not None], limit)


def encode_failure(failure: Failure) -> Message:
    """The only part of a notice of failure; texts are cut to what fits, also if each letter takes four bytes."""
    head = Failure(failure.rank, failure.doing[:200], failure.cause[:800], failure.traceback[-1600:])
    (notice,) = _parts(_FAILURE, Stamp(0), Layout(pickle.dumps(head), ()), [], FIRST_BYTES)
    return notice


def _parts(kind: int, stamp: Stamp, layout: Layout, tensors: list[torch.Tensor], limit: int) -> tuple[Message, ...]:
    tail = _TAIL.pack(stamp.channel, stamp.place & 0xFFFFFFFF)
    if layout.total <= SMALL:
        content = _joined(layout, tensors)
        checksum = zlib.crc32(content) if stamp.verify else 0
        message: Message = b"".join((_prefix(kind, 1, checksum, stamp, layout), content, tail))
    else:
        message = _gathered(layout, tensors)
        checksum = _checksum(_view(message), layout.total) if stamp.verify else 0
        ctypes.memmove(message.data_ptr(), _prefix(kind, 1, checksum, stamp, layout), ALIGNMENT)
        ctypes.memmove(message.data_ptr() + layout.total, tail, _TAIL.size)
    if layout.total + _TAIL.size <= limit:
        return (message,)
    return (_prefix(kind, 2, checksum, stamp, layout)[: -_TAIL.size] + tail, message)


def _prefix(kind: int, parts: int, checksum: int, stamp: Stamp, layout: Layout) -> bytes:
    sizes = len(layout.description), layout.total
    return _PREFIX.pack(_MAGIC, kind, parts, stamp.verify, checksum, stamp.call, stamp.microbatch, *sizes, stamp.place)


def _joined(layout: Layout, tensors: list[torch.Tensor]) -> bytes:
    """Description and tensors of a small message; moved by hand, since torch's operators take longer to begin."""
    pieces = [layout.padded_description]
    for (shape, _, size), tensor in zip(layout.tensors, tensors, strict=True):
        plain = tensor if _is_plain(tensor, shape) else _empty(shape).copy_(tensor)
        pieces.append(ctypes.string_at(plain.data_ptr(), size))
        pieces.append(bytes(aligned(size) - size))
    return b"".join(pieces)


def _gathered(layout: Layout, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The memory of a large message, with description and tensors in their places."""
    message = torch.empty(layout.total + _TAIL.size, dtype=torch.uint8, device="cpu")
    ctypes.memmove(message.data_ptr() + ALIGNMENT, layout.description, len(layout.description))
    for (shape, place, size), tensor in zip(layout.tensors, tensors, strict=True):
        if size <= SMALL and _is_plain(tensor, shape):
            ctypes.memmove(message.data_ptr() + place, tensor.data_ptr(), size)
        else:
            _place(message, place, shape).copy_(tensor)
    return message


def _is_plain(tensor: torch.Tensor, shape: Shape) -> bool:
    """Whether the bytes that the message wants are those that stand at ``data_ptr``, one after the other."""
    return (
        shape[2] is None
        and type(tensor) is torch.Tensor
        and tensor.is_cpu
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.data_ptr() != 0
    )


def _empty(shape: Shape) -> torch.Tensor:
    dtype, sizes, strides = shape
    if strides is None:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    return torch.empty_strided(sizes, strides, dtype=dtype, device="cpu")


def _place(message: torch.Tensor, place: int, shape: Shape) -> torch.Tensor:
    """A tensor in the memory of ``message`` that is no view to autograd, so that it may be changed in place."""
    dtype, sizes, strides = shape
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    return tensor.set_(message.untyped_storage(), place // dtype.itemsize, sizes, strides or ())


def _view(message: Message) -> memoryview:
    """Its bytes, where they stand."""
    if isinstance(message, torch.Tensor):
        return memoryview(_MEMORY.from_address(message.data_ptr())).cast("B")[: len(message)]
    return memoryview(message)


def _checksum(message: memoryview, total: int) -> int:
    """Of all bytes between prefix and tail."""
    return zlib.crc32(message[ALIGNMENT:total])


class _Prefix(NamedTuple):
    magic: bytes
    kind: int
    parts: int
    is_verified: int
    checksum: int
    call: int
    microbatch: int
    length: int
    total: int
    place: int


@frozen(eq=False)
class Arrived:
    """A part of a message that has come, and is the one that its channel carries at its place, to its end.

    Attributes:
        second_part_bytes: length of the second part that this one announces; 0 if this is the whole message.
    """

    second_part_bytes: int
    _part: Message
    _view: memoryview
    _stamp: Stamp
    _prefix: _Prefix

    @classmethod
    def opened(cls, part: Message, stamp: Stamp) -> Arrived:
        """Check a part.

        Args:
            part: maybe longer than what has come.
            stamp: of the message that is expected.

        Raises:
            PeerFailedError: it is a notice of failure.
            TransportError: it is another message, or one whose end is missing.
        """
        view = _view(part)
        if len(view) < ALIGNMENT:
            raise _too_short(view, ALIGNMENT)
        prefix = _Prefix._make(_PREFIX.unpack_from(view))
        if prefix.magic != _MAGIC:
            raise TransportError(
                f"a message begins with {prefix.magic!r}, not with {_MAGIC!r}: the channel carries foreign data."
            )
        if prefix.kind == _FAILURE:
            failure = pickle.loads(view[ALIGNMENT : ALIGNMENT + prefix.length])
            assert isinstance(failure, Failure)
            raise failure.as_error()
        if prefix.place != stamp.place:
            raise TransportError(
                f"message {prefix.place} of a channel arrived where message {stamp.place} was expected: one was lost, "
                "or came twice."
            )
        is_whole = prefix.parts == 1
        end = prefix.total + _TAIL.size if is_whole else ALIGNMENT
        if end > len(view):
            raise _too_short(view, end)
        if view[end - _TAIL.size : end] != _TAIL.pack(stamp.channel, stamp.place & 0xFFFFFFFF):
            raise TransportError(f"message {stamp.place} of a channel arrived without its end: it was cut short.")
        return cls(0 if is_whole else prefix.total + _TAIL.size, part, view, stamp, prefix)

    def cargo(self) -> Cargo:
        """The message as a cargo; its large tensors live in the received bytes.

        Raises:
            TransportError: it belongs to another microbatch or call, is no cargo, or lies about its size.
        """
        layout = read_layout(self._description(_CARGO))
        tensors = iter(self._tensors(layout))
        leaves = [
            next(tensors) if shape else constant
            for shape, constant in zip(layout.shapes, layout.constants, strict=True)
        ]
        return Cargo(layout.spec, layout.places, tuple(leaves), layout.needs_grad, tuple(tensors))

    def grads(self) -> Grads:
        """The message as gradients; the large ones live in the received bytes.

        Raises:
            TransportError: as ``cargo``.
        """
        layout = read_grads_layout(self._description(_GRADS))
        tensors = iter(self._tensors(layout))
        return tuple([next(tensors) if shape else None for shape in layout.shapes])

    def _description(self, kind: int) -> bytes:
        prefix, stamp = self._prefix, self._stamp
        got, wanted = (prefix.kind, prefix.call, prefix.microbatch), (kind, stamp.call, stamp.microbatch)
        if got != wanted:
            raise TransportError(
                "a message of kind {} of call {} for microbatch {} arrived where one of ".format(*got)
                + "kind {} of call {} for microbatch {} was expected.".format(*wanted)
            )
        if prefix.is_verified and _checksum(self._view, prefix.total) != prefix.checksum:
            raise TransportError(
                f"the checksum of a message for microbatch {stamp.microbatch} is wrong: bytes were changed."
            )
        return bytes(self._view[ALIGNMENT : ALIGNMENT + prefix.length])

    def _tensors(self, layout: Layout) -> list[torch.Tensor]:
        if layout.total > len(self._view):
            raise TransportError(
                f"a message of {len(self._view)} bytes announces tensors of {layout.total} bytes in all: "
                + ", ".join(f"{dtype} {list(sizes)}" for (dtype, sizes, _), _, _ in layout.tensors)
            )
        tensors = []
        for shape, place, size in layout.tensors:
            if size > SMALL and isinstance(self._part, torch.Tensor):
                tensors.append(_place(self._part, place, shape))
            else:
                tensors.append(tensor := _empty(shape))
                ctypes.memmove(tensor.data_ptr(), bytes(self._view[place : place + size]), size)
        return tensors


def _too_short(view: memoryview, announced: int) -> TransportError:
    return TransportError(f"a message of {len(view)} bytes arrived where {announced} bytes were announced.")


def packed(tree: Any) -> bytes:
    """A tree of tensors as bytes that are no message, but travel in an exchange."""
    (message,) = encode_cargo(Cargo.of(tree), Stamp(0), limit=sys.maxsize)
    return bytes(_view(message))


def unpacked(word: bytes) -> Any:
    """The tree again, its tensors on the CPU."""
    return Arrived.opened(word, Stamp(0)).cargo().tree()
