"""Drafts: one rank's part of a batch while it is being written, and the places of its receives.

Note [posted ahead]: a receive is posted in the batch in which its sender sends, so nothing is posted that nobody
matches; within the batch at most ``AHEAD`` computing actions before its use, so that two buffers suffice, not before
its size is known, and for each sender in the order of its sends.  Its send does not depend on this rank's next batch
and it is never posted ahead over a yield, so that no receive hangs on the caller's code.
"""

from __future__ import annotations

from collections import defaultdict

from attrs import define, field

from pipeline_engine.plan.actions import Action, Compute, PostRecv, Program, Send, WaitRecv, WaitSend, Yield
from pipeline_engine.plan.values import Activation, InputGrad, Output

AHEAD = 2


@define(eq=False)
class Message:
    """A value on its way from one rank to another.

    Attributes:
        number: of the value.
        proves: messages of the other direction that have arrived, since the sender had read them before it sent this.
        sizable: the place in the receiver's draft from which on the size is known.
        wanted: the place in the receiver's draft at which it had best be posted; -1 if it is not waited for there.
    """

    value: Activation | InputGrad | Output
    number: int
    source: int
    target: int
    proves: list[Message]
    sizable: int = 0
    wanted: int = -1


@define(eq=False)
class Draft:
    """What one rank does in one batch; a place is a number of actions that stand before it."""

    actions: list[Action] = field(factory=list)
    _arriving: list[Message] = field(factory=list)  # in the senders' order
    _computed: list[int] = field(factory=list)  # places of the computing actions since the last yield
    _floor: int = 0  # the place after the last yield
    _end: int = -1  # the place at which computing ended, if it did
    _sent: dict[int, int] = field(factory=dict)  # for the numbers of values that were sent the place after it

    @property
    def is_begun(self) -> bool:
        """Whether anything was written or expected."""
        return bool(self.actions or self._arriving or self._end >= 0)

    def compute(self, action: Compute) -> None:
        """Add a computing action."""
        self._computed.append(len(self.actions))
        self.actions.append(action)

    def send(self, message: Message) -> None:
        """Add the sending of a value."""
        self.actions.append(Send(message.value, message.target))
        self._sent[message.number] = len(self.actions)

    def wait_send(self, message: Message) -> None:
        """Add the wait for a send."""
        self.actions.append(WaitSend(message.value, message.target))

    def expect(self, message: Message, sizes: list[int]) -> None:
        """A peer sends this in the same batch; ``sizes``: numbers of the values from which its size is known."""
        for number in sizes:
            message.sizable = max(message.sizable, self._sent.get(number, 0))
        self._arriving.append(message)

    def receive(self, message: Message) -> None:
        """Add the wait for a message."""
        computed = self._computed
        message.wanted = computed[-AHEAD] if len(computed) >= AHEAD else self._floor
        self.actions.append(WaitRecv(message.value, message.source))

    def end_computing(self) -> None:
        """Nothing more is computed in this batch; receives that it does not wait for are posted here."""
        if self._end < 0:
            self._end = len(self.actions)

    def hand_out(self, microbatch: int) -> None:
        """Add a yield."""
        self.actions.append(Yield(microbatch))
        self._computed, self._floor = [], len(self.actions)

    def finish(self) -> Program:
        """The rank's part of the batch with its receives posted; see Note [posted ahead]."""
        if not self._arriving:
            return tuple(self.actions)
        self.end_computing()
        posts: defaultdict[int, list[Action]] = defaultdict(list)
        for place, message in zip(self._places(), self._arriving, strict=True):
            posts[place].append(PostRecv(message.value, message.source))
        merged: list[Action] = []
        done = 0
        for place in sorted(posts):
            merged += self.actions[done:place]
            merged += posts[place]
            done = place
        return (*merged, *self.actions[done:])

    def _places(self) -> list[int]:
        """For each arriving message the place of its post: as wanted, but in the order of each sender's sends."""
        arriving = self._arriving
        places = [self._end if message.wanted < 0 else message.wanted for message in arriving]
        if len(arriving) == 1:
            return [max(places[0], arriving[0].sizable)]
        soonest: dict[int, int] = {}
        for index in reversed(range(len(arriving))):
            source = arriving[index].source
            soonest[source] = places[index] = min(places[index], soonest.get(source, places[index]))
        latest: dict[int, int] = {}
        for index, message in enumerate(arriving):
            place = max(places[index], message.sizable, latest.get(message.source, 0))
            latest[message.source] = places[index] = place
        return places
