"""The watchdog: a thread that hears what other ranks say while the main thread computes or blocks.

It knows the first failure of the present epoch (an epoch ends with each settle), the words of every exchange, how much
each peer has posted, and who has left.  What to do about it is the business of its ``Master``.
"""

from __future__ import annotations

import json
import pickle
import selectors
import signal
import socket
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from threading import Condition, RLock, Thread
from time import monotonic
from typing import Protocol

from attrs import Factory, asdict, define, field

from pipeline_engine.run.transports.base import SECONDS_TO_EXPLAIN, Failure
from pipeline_engine.run.transports.wires import Frame, Kind, Wire
from pipeline_engine.run.words import Words

LOST = "its connection was lost"


class Master(Protocol):
    """Whom the watchdog calls, always from its own thread."""

    def on_news(self) -> None:
        """Something was heard."""

    def fail(self, failure: Failure) -> None:
        """The wire to a peer ended without a goodbye, or the watchdog itself cannot go on."""

    def on_patience_lost(self) -> None:
        """A failure has been known for ``grace`` seconds."""

    def on_interrupt(self) -> None:
        """Ctrl-C was pressed while ``doorbell`` was the wakeup descriptor of signals."""

    def state(self) -> bytes:
        """What this rank does and waits for."""


def pack_failure(failure: Failure) -> bytes:
    return json.dumps(asdict(failure)).encode()


def unpack_failure(text: bytes) -> Failure:
    return Failure(**json.loads(text))


@define(eq=False)
class Watchdog:
    """All that is heard is kept here.

    The lock is taken by itself, not through its condition: Ctrl-C within ``Condition.__enter__`` would leave it locked.
    """

    rank: int
    _wires: Mapping[int, Wire]
    _master: Master
    grace: float = 0.3
    _lock: RLock = Factory(RLock)
    _changed: Condition = Factory(lambda self: Condition(self._lock), takes_self=True)
    epoch: int = 0
    _left: dict[int, Failure] = Factory(dict)
    _last_exchange: dict[int, tuple[int, int] | None] = Factory(dict)  # in which this rank, and those who left, spoke
    _died: dict[int, Failure] = Factory(dict)
    _failures: dict[int, Failure] = Factory(dict)
    _words: Words = Factory(lambda self: Words(1 + len(self._wires)), takes_self=True)
    _tallies: dict[int, dict[int, bytes]] = Factory(lambda: defaultdict(dict))
    _answers: dict[int, dict[int, bytes]] = Factory(lambda: defaultdict(dict))
    _departures: dict[int, bytes] = Factory(dict)  # by peer, the last one of this epoch
    _own_departure: tuple[float, bytes] | None = None  # and when it is told
    _questions: int = 0
    _alarm: float | None = None
    _closed: bool = False
    _selector: selectors.BaseSelector = Factory(selectors.DefaultSelector)
    _bell: tuple[socket.socket, socket.socket] = Factory(socket.socketpair)
    _thread: Thread = field(init=False)

    def __attrs_post_init__(self) -> None:
        for peer, wire in self._wires.items():
            self._selector.register(wire.socket, selectors.EVENT_READ, peer)
        for end in self._bell:
            end.setblocking(False)
        self._selector.register(self._bell[0], selectors.EVENT_READ, None)

    def start(self) -> None:
        """Begin to listen; not earlier than the master can be called."""
        self._thread = Thread(target=self._watch, name=f"watchdog of rank {self.rank}", daemon=True)
        self._thread.start()

    @property
    def doorbell(self) -> int:
        """A file descriptor: a byte written to it wakes the thread."""
        return self._bell[1].fileno()

    # What is known.

    def failure(self) -> Failure | None:
        return self._failures.get(self.epoch)

    def gone(self, peer: int) -> Failure | None:
        """How ``peer`` left or died; it will never say anything again."""
        return self._died.get(peer) or self._left.get(peer)

    def words_are_complete(self, number: int) -> bool:
        """Whether all that was said in exchange ``number`` of this epoch is here."""
        return self._words.are_complete((self.epoch, number))

    def words(self, number: int) -> list[bytes]:
        """All that was said in exchange ``number`` of this epoch, in rank order, once it is complete."""
        return list(self._words.said((self.epoch, number)))

    def drop_words(self, number: int) -> None:
        """Exchange ``number`` is over.  One that ends an epoch is kept until the next: Ctrl-C may come in between."""
        with self._lock:
            self._words.drop((self.epoch, number))

    def unheard(self, number: int) -> list[int]:
        """Ranks of which this one does not know that they are, or were when they left, in exchange ``number``."""
        exchange = (self.epoch, number)
        with self._lock:
            unheard = self._words.unheard(exchange)
            return [rank for rank in unheard if rank != self.rank and self._last_exchange.get(rank) != exchange]

    @property
    def has_strays(self) -> bool:
        """Whether there may be early words or departures; never blocks."""
        return bool(self._departures) or self._words.some_are_early

    def early_words(self, number: int) -> list[tuple[int, bytes]]:
        """What peers have said who have waited for long in exchange ``number``; never blocks."""
        return self._words.early((self.epoch, number))

    def departures(self) -> list[tuple[int, bytes]]:
        """What peers have said when they left a loop, in this epoch; never blocks."""
        return list(self._departures.items()) if self._departures else []

    def tallies(self) -> dict[int, bytes]:
        """What each rank has posted in this epoch, as far as it was told."""
        with self._lock:
            return self._tallies[self.epoch]

    def wait_until(self, over: Callable[[], bool], seconds: float) -> bool:
        """Block until ``over``, at most ``seconds``; whether it is."""
        with self._lock:
            return self._changed.wait_for(over, min(seconds, 1e6))

    # What this rank says.

    def tell_all(self, kind: Kind, body: bytes, number: int = 0) -> None:
        for wire in self._wires.values():
            wire.send(Frame(kind, self.epoch, number, body))

    def tell_tallies(self, tally_for: Callable[[int], bytes]) -> None:
        """Tell each peer how much this rank has posted on the channels shared with it."""
        with self._lock:
            self.tallies()[self.rank] = tally_for(self.rank)
        for peer, wire in self._wires.items():
            wire.send(Frame(Kind.TALLY, self.epoch, 0, tally_for(peer)))

    def learn(self, failure: Failure) -> None:
        """Take ``failure`` for the first of this epoch, unless another one is known."""
        with self._lock:
            self._failures.setdefault(self.epoch, failure)
            self._own_departure = None
            self._alarm = self._alarm or monotonic() + self.grace
            self._changed.notify_all()
        self._ring()

    def say_later(self, departure: bytes) -> None:
        """Tell all soon, unless this rank says something else before; for any thread, and takes no lock."""
        self._own_departure = (monotonic() + SECONDS_TO_EXPLAIN, departure)
        self._ring()

    def say_word(self, number: int, word: bytes) -> bool:
        """Speak in exchange ``number`` of this epoch; see Note [one gathers].

        Returns:
            whether it was said early, because the caller has just left a loop in which others may wait for him.
        """
        with self._lock:
            has_left, self._own_departure = self._own_departure is not None, None
            self._last_exchange[self.rank] = (self.epoch, number)
            told = self._words.gather((self.epoch, number), 0, word) if self.rank == 0 else b""
        if self.rank != 0:
            self._wires[0].send(Frame(Kind.WORD, self.epoch, number, word))
        elif told:
            self._tell_words(Frame(Kind.WORDS, self.epoch, number, told))
        if has_left and not told:
            self.say_early(number, word)
        return has_left

    def _tell_words(self, words: Frame) -> None:
        for wire in self._wires.values():
            wire.send(words)
        with self._lock:
            self._words.learn((words.epoch, words.number), words.body)
            self._changed.notify_all()

    def say_early(self, number: int, word: bytes) -> None:
        """Tell all that this rank is in exchange ``number``, since somebody may not be on the way to it."""
        self.tell_all(Kind.EARLY, word, number)

    def ask_all(self, seconds: float) -> dict[int, bytes]:
        """What every rank that can be reached says that it does; those that do not answer in time are left out."""
        self._questions += 1
        answers = self._answers[self._questions]
        answers[self.rank] = self._master.state()
        self.tell_all(Kind.ASK, b"", self._questions)
        self.wait_until(lambda: all(peer in answers or self.gone(peer) for peer in self._wires), seconds)
        with self._lock:
            return dict(sorted(self._answers.pop(self._questions).items()))

    def begin_epoch(self) -> None:
        """Forget this epoch; what ranks that are ahead have said of the next one stands."""
        with self._lock:
            self._failures.pop(self.epoch, None)
            self._tallies.pop(self.epoch, None)
            self._words.forget(self.epoch)
            self._departures.clear()
            self._own_departure = None
            self.epoch += 1
            if self._died:
                self._failures[self.epoch] = next(iter(self._died.values()))
            self._alarm = monotonic() + self.grace if self.failure() else None

    def close(self) -> None:
        """Say goodbye and end the thread."""
        if self._closed:
            return
        self.tell_all(Kind.GOODBYE, pickle.dumps(self._last_exchange.get(self.rank)))
        self._closed = True
        self._ring()
        self._thread.join()

    def _ring(self) -> None:
        try:
            self._bell[1].send(b"\0")
        except OSError:
            return  # the bell is full, so it rings already, or the thread has ended

    # The thread.

    def _watch(self) -> None:
        try:
            while not self._closed:
                self._round()
        except Exception as error:
            self._give_up(Failure(self.rank, "its watch", repr(error), traceback.format_exc()))
        for wire in self._wires.values():
            wire.socket.close()
        for end in self._bell:
            end.close()
        self._selector.close()

    def _give_up(self, failure: Failure) -> None:
        """If the thread died silently everyone might block: nobody is reachable any more, and all are told."""
        with self._lock:
            self._died |= dict.fromkeys(self._wires, failure)
            self._changed.notify_all()
        self._master.fail(failure)

    def _round(self) -> None:
        """Hear everyone who has something to say, then act; what was said before a death counts before the death."""
        ready = [key.data for key, _ in self._selector.select(self._patience())]
        dead = [peer for peer in ready if peer is not None and self._hear(peer)]
        rung = self._answer_bell() if None in ready else b""
        if ready:
            self._master.on_news()
        for peer in dead:
            self._master.fail(self._died[peer])
        if signal.SIGINT in rung:
            self._master.on_interrupt()
        if self._alarm is not None and monotonic() >= self._alarm:
            self._alarm = None
            self._master.on_patience_lost()
        self._tell_departure()

    def _tell_departure(self) -> None:
        with self._lock:
            due, self._own_departure = self._own_departure, None
            if due is not None and monotonic() < due[0]:
                due, self._own_departure = None, due
        if due is not None:
            self.tell_all(Kind.DEPARTURE, due[1])

    def _patience(self) -> float | None:
        alarm, departure = self._alarm, self._own_departure
        times = [time for time in (alarm, departure[0] if departure else None) if time is not None]
        return max(min(times) - monotonic(), 0) if times else None

    def _answer_bell(self) -> bytes:
        try:
            return self._bell[0].recv(4096)
        except BlockingIOError:
            return b""

    def _hear(self, peer: int) -> bool:
        """Take in what ``peer`` has said; True if it died."""
        frames, ended = self._wires[peer].read()
        if ended:
            self._selector.unregister(self._wires[peer].socket)
        with self._lock:
            answers = [answer for frame in frames if (answer := self._note(peer, frame)) is not None]
            if ended and peer not in self._left:
                self._died[peer] = Failure(peer, "an unknown action", LOST, "")
            if ended or any(frame.kind is not Kind.WORD for frame in frames):  # a word alone ends no wait
                self._changed.notify_all()
        for answer in answers:
            if answer.kind is Kind.WORDS:
                self._tell_words(answer)
            else:
                self._wires[peer].send(answer)
        return peer in self._died

    def _note(self, peer: int, frame: Frame) -> Frame | None:
        """Take in a frame; what is to be said to it, words to all and an answer to ``peer``."""
        if frame.kind is Kind.GOODBYE:
            self._last_exchange[peer] = pickle.loads(frame.body)
            self._left[peer] = Failure(peer, "an unknown action", "it closed its transport", "")
        elif frame.kind is Kind.ASK:
            return Frame(Kind.ANSWER, frame.epoch, frame.number, self._master.state())
        elif frame.kind is Kind.ANSWER:
            if frame.number in self._answers:
                self._answers[frame.number][peer] = frame.body
        elif frame.epoch < self.epoch:
            return None  # settled already
        elif frame.kind is Kind.WORD:
            told = self._words.gather((frame.epoch, frame.number), peer, frame.body)
            return Frame(Kind.WORDS, frame.epoch, frame.number, told) if told else None
        elif frame.kind is Kind.WORDS:
            self._words.learn((frame.epoch, frame.number), frame.body)
        elif frame.kind is Kind.EARLY:
            self._words.hear_early((frame.epoch, frame.number), peer, frame.body)
        elif frame.kind is Kind.DEPARTURE:
            self._departures[peer] = frame.body
        elif frame.kind is Kind.TALLY:
            self._tallies[frame.epoch][peer] = frame.body
        else:
            self._failures.setdefault(frame.epoch, unpack_failure(frame.body))
            if frame.epoch == self.epoch:
                self._alarm = self._alarm or monotonic() + self.grace
        return None
