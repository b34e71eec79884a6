"""What a transport promises: ordered byte messages between the ranks of one pipeline, and a word about who failed.

Data plane: ``send`` and ``receive`` only start; ``wait`` blocks.  A send may complete as late as when its receive is
posted (rendezvous), messages of one channel arrive in the order in which they were sent, and a message may be shorter
than its receive but never longer.  Both ends know how long the receive is, the ``room``.
Control plane: ``exchange`` is one small agreement between all ranks, ``fail`` tells every rank of a failure,
``failure`` says what is known, ``settle`` makes the channels usable again afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
from attrs import field, frozen, validators

from pipeline_engine.errors import PeerFailedError
from pipeline_engine.plan.values import Channel

Message: TypeAlias = torch.Tensor | bytes | bytearray
"""A one-dimensional contiguous uint8 tensor on the CPU, or bytes."""

SMALL = 32 * 1024
"""Messages up to this many bytes are better given as bytes: tensors take longer to begin with."""

SECONDS_TO_EXPLAIN = 0.5
"""Whoever leaves a loop may say more about it, with a traceback, before peers are told that he has."""


@frozen
class Failure:
    """Who failed first: the rank, what it was doing, its exception and traceback as text."""

    rank: int = field(validator=[validators.instance_of(int), validators.ge(0)])
    doing: str = field(validator=validators.instance_of(str))
    cause: str = field(validator=validators.instance_of(str))
    traceback: str = field(validator=validators.instance_of(str))

    def as_error(self) -> PeerFailedError:
        """The exception that every other rank raises."""
        return PeerFailedError(self.rank, self.doing, self.cause, self.traceback)


class Handle(ABC):
    """One message on its way.  Leave ``buffer``, which holds it or will hold it, alone until waited for."""

    channel: Channel
    buffer: Message


class Host(Protocol):
    """The pipeline behind a transport.  It is asked from any thread, while its own may block."""

    def state(self) -> bytes:
        """What this rank does and waits for."""

    def judge(self, peer: int, word: bytes) -> Failure | None:
        """Whether rank ``peer`` has left what this rank is in, by its word in the next exchange, or when it left."""


class Transport(ABC):
    """One rank's end of the channels of a pipeline.

    Attributes:
        host: the pipeline, once there is one.
        has_raised: whether a failure was raised to this rank's caller, so that a ``settle`` comes next.
        shares_process: whether other ranks are threads of this process.
    """

    rank: int
    num_ranks: int
    shares_process: bool = False
    host: Host | None = None
    has_raised: bool = False

    @abstractmethod
    def open(self, channels: Sequence[Channel], *, deadline: float) -> None:
        """Build the channels that start or end here.  Collective: every rank passes the same sequence.

        Args:
            channels: all channels of the pipeline; those that do not touch this rank are passed over.
            deadline: seconds for each single wait for a peer.
        """

    @abstractmethod
    def send(self, channel: Channel, message: Message, *, room: int | None = None) -> Handle:
        """Start sending ``message``.

        Args:
            channel: starts here.
            message: at least one byte, at most ``room``; it may arrive as bytes or as a tensor, whichever it was here.
            room: what the other end posts for this message, in bytes; None if that is the length of the message.
        """

    @abstractmethod
    def receive(self, channel: Channel, room: int) -> Handle:
        """Post a receive for the next message of ``channel``, at most ``room`` bytes long."""

    @abstractmethod
    def wait(self, handle: Handle, *, deadline: float) -> None:
        """Block until the message has been moved; afterwards the memory of one that was sent may be written over.

        Raises:
            PeerFailedError: a rank failed, or the connection to the peer was lost.
            DeadlineError: ``deadline`` seconds passed; the channels are then unusable until ``settle``.
        """

    @abstractmethod
    def exchange(self, word: bytes, *, deadline: float) -> list[bytes]:
        """Give every rank's ``word`` to every rank, in rank order.  Collective.

        Raises:
            PeerFailedError: a rank failed or died instead of taking part.
            DeadlineError: some rank did not take part in ``deadline`` seconds; the message names it.
        """

    def states(self, seconds: float) -> dict[int, bytes]:
        """What the host of each rank says that it does; a rank that says nothing within ``seconds`` is left out."""
        return {}

    def leave(self, word: bytes) -> None:  # noqa: B027  a transport that says nothing leaves it to the deadline
        """This rank's caller has left a loop: the host of every peer is to ``judge`` this ``word``.

        It need not, if this rank takes part in an exchange or fails within ``SECONDS_TO_EXPLAIN``.  For any thread, and
        for finalisers: never blocks.
        """

    @abstractmethod
    def fail(self, failure: Failure) -> None:
        """Tell every rank of ``failure``.  The first one told wins.  Returns at once and never raises."""

    @abstractmethod
    def failure(self) -> Failure | None:
        """The failure that this rank knows of since the last ``settle``; never blocks."""

    @abstractmethod
    def settle(self, *, deadline: float) -> None:
        """Empty every channel after a failure and forget the failure.  Collective.

        Messages still owed are topped up (shorter ones, content is meaningless) and waited for; where a channel is
        beyond that, all ranks drop their channels and build them again.

        Raises:
            PeerFailedError, DeadlineError: a rank is gone for good; the transport stays unusable.
        """

    @abstractmethod
    def close(self) -> None:
        """Release channels, threads and connections.  Not collective, never raises, may be called twice."""
