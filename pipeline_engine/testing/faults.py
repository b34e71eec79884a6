"""Faults: a transport around another one that does to chosen messages what a bad network, or a bug, would do."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from enum import Enum

import torch
from attrs import define

from pipeline_engine.errors import TransportError
from pipeline_engine.plan.values import Channel
from pipeline_engine.run.transports.base import Failure, Handle, Host, Message, Transport

SECONDS_OF_DELAY = 0.02


class Fault(Enum):
    """What may become of a message.

    The first two are no faults of a transport: whoever uses one must get the same results with them.
    """

    DELAY = "delay"
    """It is sent up to ``SECONDS_OF_DELAY`` later."""
    REORDER = "reorder"
    """It is held back until one on another channel was sent, or this rank waits for something."""
    DUPLICATE = "duplicate"
    """It is sent twice.  Over gloo a large one may end the receiver's process."""
    TRUNCATE = "truncate"
    """Its end is missing."""
    DROP = "drop"
    """It is not sent.  Over gloo a larger one that comes in its place may end the receiver's process."""
    CLOSE = "close"
    """This rank's transport closes in its place."""
    FAIL = "fail"
    """TransportError is raised in its place."""


HARMLESS = (Fault.DELAY, Fault.REORDER)


@define(eq=False)
class _Held(Handle):
    """A send that was held back or dropped; ``sent`` is the real one if there is one."""

    channel: Channel
    buffer: Message
    room: int | None
    sent: Handle | None = None


class FaultyTransport(Transport):
    """One rank's end of ``transport``, with faults.

    Args:
        transport: any other; the peers need not know.
        sends: by the number of a send of this rank, counted from 0, what becomes of it.
        receives: the same for its receives, in the order in which they are posted; ``DELAY``, ``CLOSE`` and ``FAIL``
            happen when one is waited for, the others have no meaning here.
        seed: of how long and how much.
    """

    def __init__(
        self,
        transport: Transport,
        sends: Mapping[int, Fault] | None = None,
        receives: Mapping[int, Fault] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self._inner = transport
        self.rank, self.num_ranks = transport.rank, transport.num_ranks
        self.shares_process = transport.shares_process
        self._random = random.Random(seed)
        self._held: list[_Held] = []
        self.plan(sends, receives)

    @classmethod
    def seeded(
        cls, transport: Transport, seed: int, *, kinds: Sequence[Fault] = tuple(Fault), rate: float = 0.05
    ) -> FaultyTransport:
        """Faults of these ``kinds`` for a share of the first thousand sends and receives; the seed decides which."""
        drawn = random.Random(seed)

        def plan() -> dict[int, Fault]:
            return {number: drawn.choice(kinds) for number in range(1000) if drawn.random() < rate}

        return cls(transport, plan(), plan(), seed=seed)

    def plan(self, sends: Mapping[int, Fault] | None = None, receives: Mapping[int, Fault] | None = None) -> None:
        """Count from 0 again, with these faults."""
        self._sends, self._receives = dict(sends or {}), dict(receives or {})
        self._sent = self._posted = 0
        self._on_wait: dict[Handle, Fault] = {}

    # Messages.

    def send(self, channel: Channel, message: Message, *, room: int | None = None) -> Handle:
        fault = self._sends.get(self._sent)
        self._sent += 1
        room = len(message) if room is None else room
        if any(held.channel == channel for held in self._held):
            self._release()
        handle = self._send(fault, channel, message, room)
        if fault is not Fault.REORDER:
            self._release()
        return handle

    def _send(self, fault: Fault | None, channel: Channel, message: Message, room: int) -> Handle:
        match fault:
            case Fault.REORDER:
                self._held.append(_Held(channel, message, room))
                return self._held[-1]
            case Fault.DROP:
                return _Held(channel, message, room)
            case Fault.DUPLICATE:
                self._inner.send(channel, _copied(message), room=room)
            case Fault.TRUNCATE:
                message = _copied(message[: self._random.randint(1, max(len(message) - 1, 1))])
            case _:
                self._happen(fault, channel)
        return self._inner.send(channel, message, room=room)

    def receive(self, channel: Channel, room: int) -> Handle:
        handle = self._inner.receive(channel, room)
        if (fault := self._receives.get(self._posted)) is not None:
            self._on_wait[handle] = fault
        self._posted += 1
        return handle

    def wait(self, handle: Handle, *, deadline: float) -> None:
        self._release()
        self._happen(self._on_wait.pop(handle, None), handle.channel)
        if isinstance(handle, _Held):
            if handle.sent is None:
                return
            handle = handle.sent
        self._inner.wait(handle, deadline=deadline)

    def _happen(self, fault: Fault | None, channel: Channel) -> None:
        if fault is Fault.DELAY:
            time.sleep(self._random.uniform(0, SECONDS_OF_DELAY))
        elif fault is Fault.CLOSE:
            self._inner.close()
        elif fault is Fault.FAIL:
            raise TransportError(f"a message on channel {channel} failed, as it was told to.")

    def _release(self) -> None:
        held, self._held = self._held, []
        for each in held:
            each.sent = self._inner.send(each.channel, each.buffer, room=each.room)

    # All the rest is the inner transport's.

    @property
    def host(self) -> Host | None:
        return self._inner.host

    @host.setter
    def host(self, host: Host | None) -> None:
        self._inner.host = host

    def open(self, channels: Sequence[Channel], *, deadline: float) -> None:
        self._inner.open(channels, deadline=deadline)

    def exchange(self, word: bytes, *, deadline: float) -> list[bytes]:
        self._release()
        return self._inner.exchange(word, deadline=deadline)

    def states(self, seconds: float) -> dict[int, bytes]:
        return self._inner.states(seconds)

    def leave(self, word: bytes) -> None:
        self._inner.leave(word)

    def fail(self, failure: Failure) -> None:
        self._inner.fail(failure)

    def failure(self) -> Failure | None:
        return self._inner.failure()

    def settle(self, *, deadline: float) -> None:
        self._held.clear()
        self._inner.settle(deadline=deadline)

    def close(self) -> None:
        self._inner.close()


def _copied(message: Message) -> Message:
    return message.clone() if isinstance(message, torch.Tensor) else message
