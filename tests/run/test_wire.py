"""The wire format: what goes in comes out, bit for bit, and a message that lies is caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline_engine.errors import PeerFailedError, TransportError
from pipeline_engine.plan.values import Channel
from pipeline_engine.run import wire
from pipeline_engine.run.cargo import ALIGNMENT, Cargo
from pipeline_engine.run.transports.base import SMALL, Failure, Message
from pipeline_engine.run.wire import Arrived, Stamp
from tests.run.test_cargo import same, trees

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
]
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple) | st.just((40, 40))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    numbers = torch.randint(0, 3, shape, generator=generator).to(dtype)
    return draw(st.sampled_from(list(LAID_OUT.values())))(numbers)


LAID_OUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda numbers: numbers,
    "transposed": lambda numbers: numbers.transpose(0, -1) if numbers.dim() else numbers,
    "with gaps": lambda numbers: numbers[..., ::2] if numbers.dim() else numbers,
    "expanded": lambda numbers: numbers[:1].expand(numbers.shape) if numbers.dim() and len(numbers) else numbers,
    "conjugate": torch.conj,
    "negative": lambda numbers: torch._neg_view(numbers) if numbers.dtype == torch.float32 else numbers,
    "zeros without memory": lambda numbers: torch._efficientzerotensor(numbers.shape),
}
"""How a tensor may stand in memory, or not stand there as what it is."""


def arrive(parts: tuple[Message, ...], stamp: Stamp) -> Arrived:
    """What the receiver reads: the first part in a larger buffer, and the second at its announced size.

    One that came as bytes may be read as bytes or in a tensor, as the transport likes.
    """
    room = torch.full((max(wire.FIRST_BYTES, len(parts[0])),), 255, dtype=torch.uint8)
    room[: len(parts[0])].copy_(tensor_of(parts[0]))
    size = Arrived.opened(room, stamp).second_part_bytes
    assert (size > 0) == (len(parts) == 2)
    if not size:
        return Arrived.opened(room if stamp.microbatch % 2 else parts[0], stamp)
    assert len(parts[1]) == size
    return Arrived.opened(tensor_of(parts[1]) if stamp.microbatch % 2 else parts[1], stamp)


def tensor_of(message: Message) -> torch.Tensor:
    """A copy."""
    return (
        message.clone()
        if isinstance(message, torch.Tensor)
        else torch.frombuffer(bytearray(message), dtype=torch.uint8)
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).flatten().view(torch.uint8)


@given(st.lists(tensors(), max_size=4), st.integers(0, 1000))
def test_tensors_of_any_dtype_and_stride_arrive_bit_for_bit(sent: list[torch.Tensor], microbatch: int) -> None:
    stamp = Stamp(microbatch)
    arrived = arrive(wire.encode_cargo(Cargo.of(sent), stamp), stamp).cargo()
    for left, right in zip(sent, arrived.leaves, strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert torch.equal(bits(left), bits(right))


@given(trees)
def test_trees_arrive_as_they_were(tree: Any) -> None:
    cargo = Cargo.of(tree)
    arrived = arrive(wire.encode_cargo(cargo, Stamp(7)), Stamp(7)).cargo()
    assert same(arrived.tree(), tree) and arrived.needs_grad == cargo.needs_grad


@given(st.lists(st.none() | tensors(), max_size=4))
def test_absent_gradients_stay_absent(grads: list[torch.Tensor | None]) -> None:
    limit = wire.FIRST_BYTES + sum(
        4 * ALIGNMENT + grad.numel() * grad.element_size() for grad in grads if grad is not None
    )
    parts = wire.encode_grads(tuple(grads), Stamp(3), limit)
    assert len(parts) == 1
    arrived = Arrived.opened(parts[0], Stamp(3)).grads()
    assert [grad is None for grad in arrived] == [grad is None for grad in grads]
    for left, right in zip(grads, arrived, strict=True):
        assert left is None or (right is not None and torch.equal(bits(left), bits(right)))


def test_a_message_is_a_copy_of_what_was_sent() -> None:
    tensor = torch.ones(4)
    (message,) = wire.encode_cargo(Cargo.of(tensor), Stamp(0))
    tensor.zero_()
    assert Arrived.opened(message, Stamp(0)).cargo().tree().tolist() == [1, 1, 1, 1]


def test_what_arrives_may_be_changed_in_place_without_touching_its_neighbours() -> None:
    (message,) = wire.encode_cargo(Cargo.of([torch.ones(3), torch.ones(5)]), Stamp(0))
    first, second = Arrived.opened(message, Stamp(0)).cargo().leaves
    version = second._version
    first.mul_(2)
    assert not first._is_view() and (second._version, second.tolist()) == (version, [1] * 5)


@pytest.mark.parametrize("short", range(0, 2 * ALIGNMENT, 8))
def test_every_part_fits_the_receive_that_is_posted_for_it(short: int) -> None:
    cargo = Cargo.of(torch.ones(wire.FIRST_BYTES // 4))
    (whole,) = wire.encode_cargo(cargo, Stamp(0), limit=10**6)
    limit = len(whole) - short
    first, *second = wire.encode_cargo(cargo, Stamp(0), limit)
    assert len(first) <= limit and len(second) == (short > 0)


def test_a_small_tensor_does_not_hold_the_message_that_it_came_in() -> None:
    (message,) = wire.encode_cargo(Cargo.of([torch.ones(3), torch.ones(5)]), Stamp(0))
    small, _ = Arrived.opened(message, Stamp(0)).cargo().leaves
    assert small.untyped_storage().nbytes() == small.numel() * 4


def test_another_microbatch_than_expected_is_refused() -> None:
    (message,) = wire.encode_cargo(Cargo.of(torch.ones(2)), Stamp(4))
    with pytest.raises(
        TransportError, match="for microbatch 4 arrived where one of kind 0 of call 0 for microbatch 5 was expected"
    ):
        Arrived.opened(message, Stamp(5)).cargo()


def test_another_kind_than_expected_is_refused() -> None:
    (message,) = wire.encode_cargo(Cargo.of(torch.ones(2)), Stamp(4))
    with pytest.raises(TransportError, match="kind 0 of call 0 for microbatch 4 arrived where one of kind 1"):
        Arrived.opened(message, Stamp(4)).grads()


def test_foreign_bytes_are_refused() -> None:
    with pytest.raises(TransportError, match="the channel carries foreign data"):
        Arrived.opened(torch.zeros(ALIGNMENT, dtype=torch.uint8), Stamp(0))


@given(st.integers(1, 500))
def test_a_message_that_was_cut_short_is_refused(missing: int) -> None:
    (message,) = wire.encode_cargo(Cargo.of(torch.ones(100)), Stamp(0))
    with pytest.raises(TransportError, match=r"a message of .* bytes arrived where 648 bytes were announced"):
        Arrived.opened(message[: len(message) - missing], Stamp(0))


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_with_a_checksum_no_changed_byte_passes(place: int, change: int) -> None:
    stamp = Stamp(0, verify=True)
    (message,) = wire.encode_cargo(Cargo.of(torch.ones(100)), stamp)
    assert torch.equal(Arrived.opened(message, stamp).cargo().tree(), torch.ones(100))
    changed = bytearray(message)
    place = ALIGNMENT + place % (len(changed) - ALIGNMENT - 8)  # the tail belongs to the channel
    changed[place] = (changed[place] + change) % 256
    with pytest.raises(TransportError, match="the checksum of a message for microbatch 0 is wrong"):
        Arrived.opened(changed, stamp).cargo()


def test_a_message_of_another_call_is_refused() -> None:
    (message,) = wire.encode_cargo(Cargo.of(torch.ones(2)), Stamp(4, call=1))
    with pytest.raises(TransportError, match="of call 1 for microbatch 4 arrived where one of kind 0 of call 2"):
        Arrived.opened(message, Stamp(4, call=2)).cargo()


@given(st.text(), st.text(), st.text(max_size=4000))
def test_a_notice_of_failure_fits_every_receive_whatever_is_written_in_it(doing: str, cause: str, trace: str) -> None:
    notice = wire.encode_failure(Failure(2, doing * 50, cause * 200, trace * 2))
    assert len(notice) <= wire.FIRST_BYTES
    with pytest.raises(PeerFailedError) as raised:
        Arrived.opened(notice, Stamp(5, call=3, place=7))
    told = raised.value
    assert told.rank == 2
    assert (doing * 50).startswith(told.doing) and (cause * 200).startswith(told.cause)


X0, DX1 = (wire.number_of(Channel(source, 1, name)) for source, name in ((0, "x0"), (2, "dx2")))


def sent_as(cargo: Cargo, channel: int, place: int) -> tuple[Message, ...]:
    return wire.encode_cargo(cargo, Stamp(place, channel=channel, place=place))


def check(part: Message, channel: int, place: int) -> None:
    Arrived.opened(part, Stamp(3, channel=channel, place=place))


@pytest.mark.parametrize("rows", [5, 5000, SMALL])
def test_every_part_of_a_message_is_that_of_its_channel_and_place(rows: int) -> None:
    for part in sent_as(Cargo.of(torch.ones(rows)), X0, 3):
        check(part, X0, 3)
        with pytest.raises(TransportError, match="message 3 of a channel arrived where message 4 was expected"):
            check(part, X0, 4)
        with pytest.raises(TransportError, match="message 3 of a channel arrived without its end: it was cut short"):
            check(part, DX1, 3)


@given(st.integers(8, 20_000))
def test_a_message_that_fills_only_the_head_of_its_receive_is_refused_whatever_stood_there(missing: int) -> None:
    """There stood the message of the same size and place on another channel, and the one before on this channel."""
    _, sent = sent_as(Cargo.of(torch.ones(5000)), X0, 3)
    for stale in (sent_as(Cargo.of(torch.zeros(5000)), DX1, 3)[1], sent_as(Cargo.of(torch.zeros(5000)), X0, 2)[1]):
        arrived = tensor_of(stale)
        arrived[: len(sent) - missing] = tensor_of(sent)[: len(sent) - missing]
        with pytest.raises(TransportError, match="cut short"):
            check(arrived, X0, 3)
