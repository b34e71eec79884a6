"""Links: the gloo connections of one rank, and the count of what was posted on them.

Gloo can neither be polled nor interrupted, so a blocked wait is ended in one of two ways.  Softly: once both ends of
a channel post nothing more, they compare how much each has posted, the one behind tops up, and every wait ends.
Hard: a wait that times out closes all connections of its process group, which ends every other wait on it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from threading import RLock
from time import monotonic
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from attrs import define, field
from torch.distributed import ProcessGroup, Store, Work  # type: ignore[attr-defined]

from pipeline_engine.errors import TransportError
from pipeline_engine.plan.values import Channel
from pipeline_engine.run.transports.base import Handle

Tally = dict[int, tuple[int, int]]  # by the channel's number: messages posted, bytes of the longest
_BROKEN = -1  # in a tally instead of a channel's number: nobody need wait for these links to drain


@define(eq=False)
class End:
    """This rank's end of one channel, and how much was posted there since the last settle."""

    number: int  # the channel's number is its tag
    peer: int
    sending: bool
    count: int = 0
    longest: int = 0
    letters: int = 0  # receives of small messages, which travel another way


@define(eq=False)
class Posted(Handle):
    """A send or a receive; its Work is in the table of ``Links``, so that nobody else keeps it alive."""

    channel: Channel
    buffer: torch.Tensor
    end: End
    over: bool = False


@define(eq=False)
class Links:
    """One generation of connections.  Main thread and watchdog both post: the lock keeps them apart."""

    rank: int
    channels: Sequence[Channel]
    _gloo: Any  # a ProcessGroupGloo, whose stub knows neither send nor recv
    _lock: RLock
    ends: dict[Channel, End] = field(init=False)
    frozen: bool = field(default=False, init=False)
    told: bool = field(default=False, init=False)  # whether all peers know how much was posted
    broken: bool = field(default=False, init=False)
    why_broken: str = field(default="", init=False)
    _works: dict[Posted, Work] = field(factory=dict, init=False)
    _topped_up: set[int] = field(factory=set, init=False)

    @classmethod
    def build(
        cls,
        group: ProcessGroup,
        store: Store,
        rank: int,
        num_ranks: int,
        channels: Sequence[Channel],
        lock: RLock,
        deadline: float,
    ) -> Links:
        """Connect this rank with all others.  Collective; ``store`` must be fresh on every rank.

        The connections are served by the thread that serves ``group``, a gloo group's.
        """
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = _devices_of(group)
        options._threads = 1
        options._timeout = timedelta(seconds=min(deadline, 1e6))
        return cls(rank, channels, gloo(store, rank, num_ranks, options), lock)

    def __attrs_post_init__(self) -> None:
        self.ends = {}
        for number, channel in enumerate(self.channels):
            if self.rank in (channel.source, channel.target):
                peer = channel.source + channel.target - self.rank
                self.ends[channel] = End(number, peer, sending=channel.source == self.rank)

    def post(self, message: Posted) -> None:
        """Start moving ``message``; if the links are frozen or broken, ``wait`` says so."""
        with self._lock:
            if not self.frozen:
                self._try_to_start(message)

    def _try_to_start(self, message: Posted) -> None:
        end, buffer = message.end, message.buffer
        start = self._gloo.send if end.sending else self._gloo.recv
        try:
            end.count += 1
            end.longest = max(end.longest, len(buffer))
            self._works[message] = start([buffer], end.peer, end.number)
        except BaseException as error:  # after Ctrl-C nobody knows whether it was posted
            self.broken = True
            if not isinstance(error, RuntimeError):
                raise

    def wait(self, message: Posted, deadline: float) -> None:
        """Block in gloo.

        Raises:
            TransportError: ``message`` is not on its way, and not for a failure of another rank.
            RuntimeError: the connection is lost, or ``deadline`` seconds passed.
        """
        if message not in self._works:
            self._refuse(message)
        self._finish(message, deadline)
        message.over = True

    def _finish(self, message: Posted, deadline: float) -> None:
        try:
            self._works[message].wait(timedelta(seconds=min(deadline, 1e6)))
        except BaseException as error:  # after Ctrl-C nobody knows whether the Work was waited for; twice is for ever
            self.broken = True
            if self.why_broken and isinstance(error, RuntimeError):
                self._refuse(message)
            raise
        del self._works[message]

    def _refuse(self, message: Posted) -> NoReturn:
        if self.broken and not self.why_broken:
            raise RuntimeError(f"the connection that carries channel {message.channel} is lost")
        why = self.why_broken or "it was posted before the last settle."
        raise TransportError(f"a message on channel {message.channel} was not moved: {why}")

    def tally(self, peer: int) -> Tally:
        """What was posted on the channels shared with ``peer``; final once frozen."""
        tally = {end.number: (end.count, end.longest) for end in self.ends.values() if end.peer == peer}
        return tally | {_BROKEN: (0, 0)} if self.broken else tally

    def top_up(self, peer: int, tally: Tally) -> None:
        """Post what this rank is behind ``peer``, once: one byte per send, enough room per receive."""
        if peer in self._topped_up:
            return
        self._topped_up.add(peer)
        self.broken |= _BROKEN in tally
        for number, (count, longest) in tally.items():
            if number == _BROKEN:
                continue
            channel = self.channels[number]
            end = self.ends[channel]
            scratch = torch.zeros(1 if end.sending else longest, dtype=torch.uint8, device="cpu")
            for _ in range(count - end.count):
                self._try_to_start(Posted(channel, scratch, end))

    def drain(self, deadline: float) -> bool:
        """Wait for everything that is posted; False if the links cannot be used any more."""
        until = monotonic() + deadline
        with suppress(RuntimeError):
            while self._works and not self.broken:
                self._finish(next(iter(self._works)), max(until - monotonic(), 0.001))
        return not self.broken

    def interrupt(self) -> None:
        """End every wait on these links, here and on the peers; afterwards they are broken."""
        self.broken = True
        for peer in {rank for channel in self.channels for rank in (channel.source, channel.target)} - {self.rank}:
            with suppress(RuntimeError):
                self._time_out(peer)

    def _time_out(self, peer: int) -> None:
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        self._gloo.recv([nothing], peer, len(self.channels)).wait(timedelta(milliseconds=1))

    def thaw(self) -> None:
        """Forget what was posted; the links are as new."""
        for end in self.ends.values():
            end.count = end.longest = end.letters = 0
        self._topped_up.clear()
        self.frozen = self.told = False

    def drop(self) -> None:
        """Close the connections: gloo does so when the last Work and the group are forgotten."""
        self.frozen = self.broken = True
        self._works.clear()
        self._gloo = None


def _devices_of(group: ProcessGroup) -> list[Any]:
    """Those of a gloo group: each has a thread, which wakes up a hundred times a second."""
    gloo: Any = dist.ProcessGroupGloo
    options: Any = getattr(group._get_backend(torch.device("cpu")), "options", None)  # not every torch tells them
    return [gloo.create_default_device()] if options is None else list(options._devices)


def pack_tally(tally: Tally) -> bytes:
    return json.dumps(list(tally.items())).encode()


def unpack_tally(text: bytes) -> Tally:
    return {number: (count, longest) for number, (count, longest) in json.loads(text)}
