"""A transport between processes: messages over gloo, and words about failures over wires of its own.

Note [how a blocked rank wakes]
A failure is written to the store (the first one wins) and told over the wires.  Every watchdog that hears of it
freezes its links and tells its peers how much it has posted; the one behind tops up, so that every wait ends within
milliseconds and the links stay whole.  Where that does not help for ``grace`` seconds (a peer is dead or stopped) the
watchdog breaks its own links; the next settle builds new ones.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import RLock, Thread, current_thread, main_thread
from time import monotonic
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup  # type: ignore[attr-defined]

from pipeline_engine.errors import DeadlineError, TransportError
from pipeline_engine.plan.values import Channel
from pipeline_engine.run.hearing import SECONDS_TO_HEAR_WHY, Hearing
from pipeline_engine.run.transports.base import SMALL, Failure, Handle, Message, Transport
from pipeline_engine.run.transports.direct import Direct, Letter
from pipeline_engine.run.transports.groups import checked, own_store
from pipeline_engine.run.transports.links import End, Links, Posted, pack_tally, unpack_tally
from pipeline_engine.run.transports.meeting import connect_wires
from pipeline_engine.run.transports.wires import Kind
from pipeline_engine.run.watchdog import LOST, Watchdog, pack_failure, unpack_failure

WHOLE = b"whole"
_SETTLED = 2**32 - 1  # the number of the exchange that ends an epoch
_BUILT = 2**32 - 2  # of the exchange after which all links stand
_SECONDS_TO_BUILD = 30.0  # gloo's rendezvous hears of no failure
_SECONDS_TO_DRAIN = 10.0
_SECONDS_FOR_THE_STORE = 0.3
_NOT_YET = b""  # the buffer of a small message until it has come


class TorchTransport(Transport):
    """One rank's end of the channels of a pipeline, over a gloo process group.

    Making one is collective over the group.  Several may live side by side over one group.

    Args:
        process_group: its ranks are the pipeline's ranks; None for the default group.
        timeout: seconds to wait for the other ranks to make theirs.
        grace: seconds between a failure and the moment when a wait that has not ended by then is ended by force.

    Raises:
        UsageError: torch.distributed is not initialised, the group is not gloo, or this rank is not in it.
        TransportError: another rank did not come.
    """

    def __init__(self, process_group: ProcessGroup | None = None, *, timeout: float = 60.0, grace: float = 0.3) -> None:
        group = checked(process_group)
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._store = group, own_store(group)
        self._lock = RLock()
        self._links = Links(self.rank, (), None, self._lock)
        self._generation = self._exchanges = 0
        self._waiting_for: Channel | None = None
        self._settling = self._settled = self._closed = False
        wires = connect_wires(self._store, self.rank, self.num_ranks, timeout)
        self._direct = Direct({})
        self._watchdog = Watchdog(self.rank, wires, self, grace)
        self._watchdog.start()

    # Data plane.

    def open(self, channels: Sequence[Channel], *, deadline: float) -> None:
        said = " ".join(map(str, channels))
        for rank, word in enumerate(self.exchange(said.encode(), deadline=deadline)):
            if word.decode() != said:
                raise TransportError(f"rank {rank} opens channels [{word.decode()}], rank {self.rank} opens [{said}].")
        self._build(tuple(channels), self.failure, deadline)

    def _build(self, channels: Sequence[Channel], failure: Callable[[], Failure | None], deadline: float) -> None:
        self._generation += 1
        try:
            with self._lock:  # the watchdog must not top up links that are half built
                self._links.drop()
                self._direct.close()
                within = min(deadline, _SECONDS_TO_BUILD)
                store = PrefixStore(f"direct/{self._generation}", self._store)
                self._direct = Direct(connect_wires(store, self.rank, self.num_ranks, within))
                store = PrefixStore(f"links/{self._generation}", self._store)
                self._links = Links.build(self._group, store, self.rank, self.num_ranks, channels, self._lock, within)
        except RuntimeError as error:
            self._watchdog.wait_until(lambda: self.failure() is not None, SECONDS_TO_HEAR_WHY)
            self._raise_failure(error)
            raise TransportError(f"rank {self.rank} could not connect to all other ranks: {error}") from error
        self._exchange(_BUILT, b"", failure, "the channels were not built", deadline)

    def send(self, channel: Channel, message: Message, *, room: int | None = None) -> Handle:
        end = self._end(channel, sending=True)
        if (len(message) if room is None else room) > SMALL:
            return self._post(Posted(channel, _tensor_of(message), end))
        epoch, given = self._watchdog.epoch, message if type(message) is bytes else _bytes_of(message)
        return Letter(channel, message, end, epoch, self._direct.send(end.peer, epoch, end.number, given))

    def receive(self, channel: Channel, room: int) -> Handle:
        end = self._end(channel, sending=False)
        if room > SMALL:
            return self._post(Posted(channel, torch.empty(room, dtype=torch.uint8, device="cpu"), end))
        end.letters += 1
        return Letter(channel, _NOT_YET, end, self._watchdog.epoch, place=end.letters - 1)

    def _end(self, channel: Channel, *, sending: bool) -> End:
        end = self._links.ends.get(channel)
        if end is None or end.sending is not sending:
            verb = "send" if sending else "receive"
            raise TransportError(f"rank {self.rank} cannot {verb} on channel {channel}, which it did not open.")
        return end

    def _post(self, message: Posted) -> Posted:
        self._links.post(message)
        return message

    def wait(self, handle: Handle, *, deadline: float) -> None:
        if isinstance(handle, Letter):
            self._wait_for_letter(handle, deadline)
            return
        assert isinstance(handle, Posted)
        self._waiting_for = handle.channel  # before the look at the failure: the watchdog looks in the other order
        try:
            self._look_ahead()
            self._raise_failure()
            if not handle.over:
                self._wait_in_gloo(handle, deadline)
            self._raise_failure()
        finally:
            self._waiting_for = None

    def _wait_for_letter(self, letter: Letter, deadline: float) -> None:
        self._raise_failure()
        if letter.epoch != self._watchdog.epoch:
            raise TransportError(
                f"a message on channel {letter.channel} was not moved: it was posted before the last settle."
            )
        end = letter.end
        if end.sending:
            moved = self._direct.wait_sent(end.peer, letter.place, over=self._watchdog.failure, deadline=deadline)
        else:
            moved = letter.buffer is not _NOT_YET or self._has_come(letter, deadline)
        if not moved:
            self._raise_failure()
            raise DeadlineError(
                f"nothing moved on channel {letter.channel} within {deadline} seconds; waiting for rank {end.peer}."
            )

    def _has_come(self, letter: Letter, deadline: float) -> bool:
        """Block until a small message is here, or a failure, or the deadline; whether it is."""
        peer, number = letter.end.peer, letter.end.number
        try:
            news = self._direct.take(peer, letter.epoch, number, letter.place, over=self._is_lost, deadline=deadline)
        except ConnectionError:
            self._explain(peer, RuntimeError(f"the connection that carries channel {letter.channel} is lost"))
        if news is None:
            return False
        letter.buffer = news
        return True

    def _is_lost(self) -> bool:
        """Whether nobody need wait for a message any more."""
        if self._watchdog.has_strays:
            self._look_ahead()
        return self._watchdog.failure() is not None

    def _wait_in_gloo(self, handle: Posted, deadline: float) -> None:
        start = monotonic()
        try:
            with _ringing_on_ctrl_c(self._watchdog.doorbell):
                self._links.wait(handle, deadline)
        except RuntimeError as error:
            peer = handle.end.peer
            if self.failure() is None and monotonic() - start >= deadline:
                late = f"nothing moved on channel {handle.channel} within {deadline} seconds; waiting for rank {peer}."
                self._links.why_broken = late
                raise DeadlineError(late) from None
            self._explain(peer, error)

    def _explain(self, peer: int, error: RuntimeError) -> NoReturn:
        """Raise the failure behind a lost connection: the one that is told soon, else ``peer`` is gone."""
        if isinstance(error, TransportError):
            raise error
        self._watchdog.wait_until(lambda: bool(self.failure() or self._watchdog.gone(peer)), SECONDS_TO_HEAR_WHY)
        self.fail(self._watchdog.gone(peer) or Failure(peer, "an unknown action", LOST, ""))
        self._raise_failure(error)
        raise error

    # Control plane.

    def exchange(self, word: bytes, *, deadline: float) -> list[bytes]:
        self._check_not_closed()
        number, self._exchanges = self._exchanges, self._exchanges + 1
        return self._exchange(number, word, self.failure, "an exchange did not end", deadline)

    def _exchange(
        self, number: int, word: bytes, failure: Callable[[], Failure | None], late: str, deadline: float
    ) -> list[bytes]:
        watchdog = self._watchdog
        was_early = watchdog.say_word(number, word)
        Hearing(
            watchdog,
            is_complete=lambda: watchdog.words_are_complete(number),
            absent=lambda: watchdog.unheard(number),
            failure=failure,
            gatherers=[0],
            when_long=lambda: None if was_early else watchdog.say_early(number, word),
            others_wait=lambda: bool(watchdog.early_words(number)),
        ).wait(late, deadline)
        words = watchdog.words(number)
        if number != _SETTLED:  # its words are kept for a settle that is tried again after Ctrl-C
            watchdog.drop_words(number)
        return words

    def _look_ahead(self) -> None:
        """Fail if a peer has strayed, to judge by what it says in the exchange that comes next here, or has said."""
        for peer, word in self._watchdog.early_words(self._exchanges) + self._watchdog.departures():
            if self.host is not None and (failure := self.host.judge(peer, word)) is not None:
                self.fail(failure)

    def states(self, seconds: float) -> dict[int, bytes]:
        return {rank: state for rank, state in self._watchdog.ask_all(seconds).items() if state}

    def leave(self, word: bytes) -> None:
        self._watchdog.say_later(word)

    def fail(self, failure: Failure) -> None:
        with suppress(Exception):
            if self.failure() is None:
                first = self._first(failure)
                self._watchdog.learn(first)
                self._watchdog.tell_all(Kind.FAILURE, pack_failure(first))
                self._balance()

    def _first(self, failure: Failure) -> Failure:
        """Of several failures at once the store tells everyone the same one; nobody waits long for its answer.

        It may be slow because its host is gone, or because a main thread blocks in the same connection.
        """
        key, text, answers = f"failure/{self._watchdog.epoch}", pack_failure(failure).decode(), list[bytes]()

        def ask() -> None:
            with suppress(Exception):
                answers.append(self._store.compare_set(key, "", text))

        asking = Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_SECONDS_FOR_THE_STORE)
        return unpack_failure(answers[0]) if answers else failure

    def failure(self) -> Failure | None:
        return self._watchdog.failure()

    def _raise_failure(self, cause: BaseException | None = None) -> None:
        if self._closed:
            self._check_not_closed()
        if (failure := self._watchdog.failure()) is not None:
            raise failure.as_error() from cause

    def _check_not_closed(self) -> None:
        if self._closed:
            raise TransportError(f"rank {self.rank} has closed its transport; make another one on every rank.")

    def settle(self, *, deadline: float) -> None:
        self._check_not_closed()
        self._settling = True
        self._balance()
        tallies = self._watchdog.tallies()

        def absent() -> list[int]:
            return [rank for rank in range(self.num_ranks) if rank not in tallies]

        hearing = Hearing(self._watchdog, is_complete=lambda: not absent(), absent=absent, failure=lambda: None)
        hearing.wait("the channels did not settle", deadline)
        self._balance()
        is_whole = self._links.drain(min(deadline, _SECONDS_TO_DRAIN)) and not self._direct.is_torn
        word = WHOLE if is_whole else b"broken"
        words = self._exchange(_SETTLED, word, lambda: None, "the channels did not settle", deadline)
        self._settled = True
        if any(word != WHOLE for word in words):
            self._build(self._links.channels, lambda: None, deadline)
        self._begin_epoch()
        self._balance()

    def _balance(self) -> None:
        """End all waits softly, see Note [how a blocked rank wakes]; nothing happens while all is well."""
        with self._lock:
            if self._settled or (self.failure() is None and not self._settling):
                return
            if not self._links.told:
                self._links.frozen = True
                self._watchdog.tell_tallies(lambda peer: pack_tally(self._links.tally(peer)))
                self._links.told = True  # if Ctrl-C comes before, the next try tells all again
            for peer, tally in list(self._watchdog.tallies().items()):
                self._links.top_up(peer, unpack_tally(tally))

    def _begin_epoch(self) -> None:
        with self._lock:
            if self.rank == 0:
                with suppress(Exception):
                    self._store.delete_key(f"failure/{self._watchdog.epoch}")
            self._links.thaw()
            self._direct.forget(before=self._watchdog.epoch + 1)
            self._exchanges = 0
            self._settling = self._settled = False
            self._watchdog.begin_epoch()

    def close(self) -> None:
        self._closed = True
        self._watchdog.close()
        self._direct.close()
        self._links.drop()

    # What the watchdog calls, from its thread.

    def on_news(self) -> None:
        self._look_ahead()
        self._balance()
        if self.failure() is not None:
            self._direct.wake()

    def on_patience_lost(self) -> None:
        with self._lock:  # a settle that begins meanwhile must find the links broken
            if self._waiting_for is not None:
                self._links.interrupt()

    def state(self) -> bytes:
        """What the host does, if there is one yet."""
        return self.host.state() if self.host is not None else b""

    def on_interrupt(self) -> None:
        if (channel := self._waiting_for) is not None:
            self.fail(Failure(self.rank, f"a wait for channel {channel}", "KeyboardInterrupt", ""))


@contextmanager
def _ringing_on_ctrl_c(doorbell: int) -> Iterator[None]:
    """Let Ctrl-C wake the watchdog: its own handler only runs when the wait in gloo has ended."""
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not handled or current_thread() is not main_thread():
        yield
        return
    before = signal.set_wakeup_fd(doorbell, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)


def _tensor_of(message: Message) -> torch.Tensor:
    return message if isinstance(message, torch.Tensor) else torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _bytes_of(message: Message) -> bytes:
    if isinstance(message, torch.Tensor):
        return ctypes.string_at(message.data_ptr(), message.numel())
    return bytes(message)  # itself, if that is what it is
