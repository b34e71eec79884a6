"""The mailbox: messages of two parts in one order, and bugs planted in it that the checks must notice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import pipeline_engine as pe
from pipeline_engine.plan.transfers import channels_of
from pipeline_engine.plan.values import Activation, Channel, InputGrad
from pipeline_engine.run import wire
from pipeline_engine.run.cargo import Cargo
from pipeline_engine.run.mailbox import Mailbox, Traffic, failure_of
from pipeline_engine.run.transports.base import Failure, Handle, Message, Transport
from pipeline_engine.run.transports.memory import MemoryTransport
from pipeline_engine.run.wire import Stamp
from pipeline_engine.testing import run_ranks_in_threads
from tests.run.playing import DEADLINE, ROWS, Rank, batch, loss_of

CHANNELS = channels_of(pe.StageGraph.chain(2, 2))


def two_mailboxes(transport: Transport) -> list[Mailbox]:
    """Those of two calls of one pipeline."""
    transport.open(CHANNELS, deadline=DEADLINE)
    traffic = Traffic()
    return [Mailbox(transport, DEADLINE, traffic, call) for call in range(2)]


def numbers(number: int, size: int) -> Cargo:
    return Cargo.of(torch.full((size,), float(number)))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_messages_of_two_parts_are_taken_in_any_order(order: tuple[int, ...]) -> None:
    sizes = [5000, 3, 9000]

    def on_rank(transport: Transport) -> None:
        mailbox, _ = two_mailboxes(transport)
        values = [Activation(0, number) for number in range(3)]
        if transport.rank == 0:
            for number, value in enumerate(values):
                mailbox.send(value, 1, numbers(number, sizes[number]))
            for value in values:
                mailbox.wait_send(value, 1)
        else:
            for value in values:
                mailbox.post(value, 0, wire.FIRST_BYTES)
            for number in order:
                tensor = mailbox.take(values[number]).cargo().tree()
                assert tensor.tolist() == [float(number)] * sizes[number]

    run_ranks_in_threads(on_rank, 2)


def test_messages_of_two_calls_on_one_channel_keep_apart() -> None:
    """Both have second parts, and the later call's is taken first."""

    def on_rank(transport: Transport) -> None:
        earlier, later = two_mailboxes(transport)
        value = Activation(0, 0)
        if transport.rank == 0:
            earlier.send(value, 1, numbers(0, 5000))
            later.send(value, 1, numbers(1, 7000))
            for mailbox in (earlier, later):
                mailbox.wait_send(value, 1)
        else:
            for mailbox in (earlier, later):
                mailbox.post(value, 0, wire.FIRST_BYTES)
            assert later.take(value).cargo().tree().sum() == 7000
            assert earlier.take(value).cargo().tree().sum() == 0

    run_ranks_in_threads(on_rank, 2)


def test_a_notice_of_failure_takes_the_place_of_every_message_that_is_owed() -> None:
    failure = failure_of(0, "0F3 (forward of stage 0, microbatch 3)", ZeroDivisionError("boom"))

    def on_rank(transport: Transport) -> None:
        mailbox, _ = two_mailboxes(transport)
        values = [Activation(0, number) for number in range(2)]
        if transport.rank == 0:
            mailbox.notify(failure, [(values[0], 1)], CHANNELS)
        else:
            for value in values:  # one more than rank 0 knows of
                mailbox.post(value, 0, wire.FIRST_BYTES)
            for value in values:
                with pytest.raises(pe.PeerFailedError, match=r"rank 0 failed while it performed 0F3 .*boom"):
                    mailbox.take(value)

    run_ranks_in_threads(on_rank, 2)


def test_passing_a_failure_on_keeps_its_origin() -> None:
    first = Failure(2, "2F0", "ValueError: boom", "its traceback")
    assert failure_of(0, "0B0", first.as_error()) == first


# Planted bugs: each must be noticed.


class Meddling(Transport):
    """Hands everything on to a real transport, except for what ``meddle`` changes in the messages that it sends."""

    def __init__(self, inner: MemoryTransport) -> None:
        self.inner, self.rank, self.num_ranks = inner, inner.rank, inner.num_ranks
        self.kept: list[tuple[Channel, Message, Any]] = []
        self.counts: Counter[str] = Counter()

    def meddle(self, channel: Channel, message: Message) -> Message:
        return message

    def send(self, channel: Channel, message: Message, *, room: int | None = None) -> Handle:
        self.counts[channel.name] += 1
        return self.inner.send(channel, self.meddle(channel, message), room=room)

    def open(self, channels: Any, *, deadline: float) -> None:
        self.inner.open(channels, deadline=deadline)

    def receive(self, channel: Channel, room: int) -> Handle:
        return self.inner.receive(channel, room)

    def wait(self, handle: Handle, *, deadline: float) -> None:
        self.inner.wait(handle, deadline=deadline)

    def exchange(self, word: bytes, *, deadline: float) -> list[bytes]:
        return self.inner.exchange(word, deadline=deadline)

    def fail(self, failure: Failure) -> None:
        self.inner.fail(failure)

    def failure(self) -> Failure | None:
        return self.inner.failure()

    def settle(self, *, deadline: float) -> None:
        self.inner.settle(deadline=deadline)

    def close(self) -> None:
        self.inner.close()


def stamp_of(channel: Channel, count: int, microbatch: int) -> Stamp:
    """Of the message that is the ``count``-th on its channel, counted from 1, for any microbatch."""
    return Stamp(microbatch, channel=wire.number_of(channel), place=count - 1)


class DropsAGradient(Meddling):
    """Sends None in the place of the third gradient of each channel."""

    def meddle(self, channel: Channel, message: Message) -> Message:
        if not channel.name.startswith("dx") or self.counts[channel.name] != 3:
            return message
        return wire.encode_grads((None,), stamp_of(channel, 3, 2), wire.FIRST_BYTES)[0]


class LiesAboutTheMicrobatch(Meddling):
    """Sends what belongs to the second microbatch as the third."""

    def meddle(self, channel: Channel, message: Message) -> Message:
        if channel.name != "x0" or self.counts["x0"] != 2:
            return message
        cargo = wire.Arrived.opened(message, stamp_of(channel, 2, 1)).cargo()
        return wire.encode_cargo(cargo, stamp_of(channel, 2, 2))[0]


class ShrinksATensor(Meddling):
    """Announces more rows than it sends."""

    def meddle(self, channel: Channel, message: Message) -> Message:
        if channel.name != "x0" or self.counts["x0"] != 2:
            return message
        longer = wire.encode_cargo(Cargo.of(torch.zeros(1000, 8)), stamp_of(channel, 2, 1), limit=10**6)[0]
        return longer[: len(message)]


class Repeats(Meddling):
    """Sends the last message of the first stage again in the place of the next one."""

    last: Message | None = None

    def meddle(self, channel: Channel, message: Message) -> Message:
        if channel.name != "x0":
            return message
        self.last, before = message, self.last
        return message if before is None else before


def train_over(make: type[Meddling]) -> list[bool | str]:
    """Train once over a transport with a bug; by rank whether the gradients were right, or the error."""

    def on_rank(transport: Transport) -> bool | str:
        assert isinstance(transport, MemoryTransport)
        rank = Rank(make(transport))
        rows = [3, 1, 4, 2]
        try:
            for item in rank.pipeline.stream(batch(rows)):
                loss_of(item.outputs, item.index).backward()
            rank.check_gradients(range(4), rows)
        except (pe.PipelineError, AssertionError) as error:
            return type(error).__name__
        return True

    return run_ranks_in_threads(on_rank, 2)


def test_an_honest_transport_passes_the_check() -> None:
    assert len(ROWS) == 5
    assert train_over(Meddling) == [True, True]


def test_a_gradient_that_is_dropped_on_its_way_is_noticed() -> None:
    assert train_over(DropsAGradient) == ["AssertionError", True]


def test_two_microbatches_that_change_places_are_a_transport_error() -> None:
    assert train_over(LiesAboutTheMicrobatch) == ["PeerFailedError", "TransportError"]


def test_a_message_that_is_shorter_than_it_says_is_a_transport_error() -> None:
    assert train_over(ShrinksATensor) == ["PeerFailedError", "TransportError"]


def test_a_message_from_before_an_invalidate_is_not_taken_for_the_one_that_was_made_again() -> None:
    """Both are for microbatch 1 of call 0, and only the second was made with the new weights."""

    def on_rank(transport: Transport) -> str:
        assert isinstance(transport, MemoryTransport)
        rank = Rank(Repeats(transport), "gpipe")
        with pytest.raises((pe.TransportError, pe.PeerFailedError)) as raised:
            for item in rank.pipeline.stream(batch([3, 3])):
                loss_of(item.outputs, item.index).backward()
                rank.pipeline.invalidate()
        return str(raised.value)

    told, own = run_ranks_in_threads(on_rank, 2)
    assert own.startswith("message 0 of a channel arrived where message 1 was expected: one was lost, or came twice")
    assert own in told


def test_a_value_that_was_never_posted_cannot_be_taken() -> None:
    mailbox = Mailbox(MemoryTransport.connect(2)[0], DEADLINE, Traffic())
    with pytest.raises(KeyError):
        mailbox.take(InputGrad(1, 0))
