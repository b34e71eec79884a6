"""Transfers: turns what the ranks compute into what they post, send, wait for and hand out.

``Transfers`` is told of computing actions one by one, in an order in which each one's needs are made.  At the end of
a batch it returns every rank's part of it, with receives posted ahead of their use.

Note [one send per value]: a value travels to a rank once, whatever number of stages there need it.

Note [posted ahead]: a receive is posted in the batch in which its sender sends, so nothing is posted that nobody
matches; within the batch at most ``AHEAD`` computing actions before its use, so that two buffers suffice, not before
its size is known, and on each channel in the order of the sends.  Its send does not depend on this rank's next batch
and it is never posted ahead over a yield, so that no receive hangs on the caller's code.

Note [proven sends]: ``WaitSend`` stands where it cannot block: after a value has come back that the peer sent after
it had received ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from itertools import pairwise

from pipeline_engine.plan.actions import (
    COMPUTE,
    Action,
    Compute,
    PostRecv,
    Program,
    Publish,
    Send,
    WaitRecv,
    WaitSend,
    Yield,
    makes,
    needs,
    sized_by,
    takers_of,
)
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.values import Channel, Output, Value, channel_of, continued

AHEAD = 2

Batch = tuple[Program, ...]
"""For each rank, the actions that one event adds to its program."""


class Transfers:
    """The traffic of one call, for all ranks at once.

    Args:
        graph: the stage graph.
        hand_out: whether outputs travel to every rank; otherwise only the last stage's rank has them.
    """

    def __init__(self, graph: StageGraph, *, hand_out: bool) -> None:
        self.graph = graph
        self.relay = graph.relay() if hand_out else graph.relay()[:1]
        ranks = range(graph.num_ranks)
        self._actions: list[list[Action]] = [[] for _ in ranks]
        self._computed: list[int | None] = [None for _ in ranks]  # how many of _actions stand before the hand-out
        self._arriving: list[list[tuple[Value, int]]] = [[] for _ in ranks]  # of this batch, in the senders' order
        self._unread: list[dict[Value, int]] = [{} for _ in ranks]  # posted, not waited for: value -> source
        self._unsent: list[dict[WaitSend, None]] = [{} for _ in ranks]  # sent, not waited for
        self._read: defaultdict[tuple[int, int], list[Value]] = defaultdict(list)  # by (reader, sender), not yet told
        self._proof: dict[tuple[Value, int, int], list[Value]] = {}  # by (value, source, target): what it proves

    def compute(self, rank: int, action: Compute) -> None:
        """Add a computing action, what it waits for and what it sends."""
        for value in needs(action, self.graph):
            if value in self._unread[rank]:
                self._receive(rank, value)
        self._actions[rank].append(action)
        for value in makes(action):
            for target in takers_of(value, self.graph):
                self._send(rank, value, target)

    def hand_out(self, microbatch: int) -> None:
        """Bring an output to every rank, hop by hop, and yield it there."""
        output = Output(microbatch)
        self._mark_computed()
        for hop, rank in enumerate(self.relay):
            if hop == 0:
                self._actions[rank].append(Publish(microbatch))
            else:
                self._receive(rank, output)
            if hop + 1 < len(self.relay):
                self._send(rank, output, self.relay[hop + 1])
            self._actions[rank].append(Yield(microbatch))

    def drain(self) -> None:
        """Wait for everything that is still on its way, needed or not."""
        self._mark_computed()
        for rank, unread in enumerate(self._unread):
            for value in tuple(unread):
                self._receive(rank, value)
        for rank, unsent in enumerate(self._unsent):
            self._actions[rank].extend(unsent)
            unsent.clear()

    def forget(self, values: Collection[Value]) -> None:
        """Wait for what is on its way of these values, so that they can be sent once more."""
        for rank, unread in enumerate(self._unread):
            for value in [value for value in unread if value in values]:
                self._receive(rank, value)
        for rank, unsent in enumerate(self._unsent):
            for wait in [wait for wait in unsent if wait.value in values]:
                self._actions[rank].append(wait)
                del unsent[wait]
        self._read = defaultdict(
            list, {pair: [v for v in read if v not in values] for pair, read in self._read.items()}
        )
        self._proof = {key: [v for v in proven if v not in values] for key, proven in self._proof.items()}

    def end_batch(self) -> Batch:
        """Every rank's actions since the last batch."""
        self._mark_computed()
        batch = tuple(self._with_posts(rank) for rank in range(self.graph.num_ranks))
        for rank in range(self.graph.num_ranks):
            self._actions[rank], self._computed[rank], self._arriving[rank] = [], None, []
        return batch

    def _mark_computed(self) -> None:
        for rank, actions in enumerate(self._actions):
            if self._computed[rank] is None:
                self._computed[rank] = len(actions)

    def _send(self, rank: int, value: Value, target: int) -> None:
        self._actions[rank].append(Send(value, target))
        self._unsent[rank][WaitSend(value, target)] = None
        self._arriving[target].append((value, rank))
        self._unread[target][value] = rank
        self._proof[value, rank, target] = self._read.pop((rank, target), [])

    def _receive(self, rank: int, value: Value) -> None:
        source = self._unread[rank].pop(value)
        self._actions[rank].append(WaitRecv(value, source))
        self._read[rank, source].append(value)
        for sent in self._proof.pop((value, source, rank)):
            wait = WaitSend(sent, source)
            del self._unsent[rank][wait]
            self._actions[rank].append(wait)

    def _with_posts(self, rank: int) -> Program:
        actions, arriving = self._actions[rank], self._arriving[rank]
        if not arriving:
            return tuple(actions)
        computed = self._computed[rank]
        places = _post_places(rank, actions, len(actions) if computed is None else computed, arriving, self.graph)
        posts: defaultdict[int, list[Action]] = defaultdict(list)
        for place, (value, source) in zip(places, arriving, strict=True):
            posts[place].append(PostRecv(value, source))
        merged: list[Action] = []
        for position, action in enumerate(actions):
            merged += posts.pop(position, ())
            merged.append(action)
        return (*merged, *(post for place in sorted(posts) for post in posts[place]))


def _post_places(
    rank: int, actions: list[Action], computed: int, arriving: list[tuple[Value, int]], graph: StageGraph
) -> list[int]:
    """For each arrival the position before which it is posted: see Note [posted ahead]."""
    wanted = [computed if place is None else place for place in _ahead(actions, arriving)]
    earliest = _sized(rank, actions, arriving, graph)
    soonest: dict[Channel, int] = {}
    for index, (value, source) in reversed(list(enumerate(arriving))):
        channel = channel_of(value, source, rank)
        soonest[channel] = wanted[index] = min(wanted[index], soonest.get(channel, len(actions)))
    latest: dict[Channel, int] = {}
    for index, (value, source) in enumerate(arriving):
        channel = channel_of(value, source, rank)
        latest[channel] = wanted[index] = max(wanted[index], earliest[index], latest.get(channel, 0))
    return wanted


def _ahead(actions: list[Action], arriving: list[tuple[Value, int]]) -> list[int | None]:
    """For each arrival the position AHEAD computing actions before it is waited for, if that is in this batch."""
    places: dict[Value, int] = {}
    computing: list[int] = []
    floor = 0
    for position, action in enumerate(actions):
        if isinstance(action, COMPUTE):
            computing.append(position)
        elif isinstance(action, Yield):
            computing, floor = [], position + 1
        elif isinstance(action, WaitRecv):
            places[action.value] = computing[-AHEAD] if len(computing) >= AHEAD else floor
    return [places.get(value) for value, _ in arriving]


def _sized(rank: int, actions: list[Action], arriving: list[tuple[Value, int]], graph: StageGraph) -> list[int]:
    """For each arrival the first position at which its size is known."""
    made = {value: position + 1 for position, action in enumerate(actions) for value in makes(action)}
    return [max((made.get(known, 0) for known in sized_by(value, rank, graph)), default=0) for value, _ in arriving]


def channels_of(graph: StageGraph) -> tuple[Channel, ...]:
    """Every channel that a run over ``graph`` can use, in one order on all ranks."""
    channels: dict[Channel, None] = {}
    for before, after in graph.edges:
        source, target = graph.rank_of[before], graph.rank_of[after]
        if source != target:
            channels[Channel(source, target, f"x{before}")] = None
            channels[Channel(target, source, f"dx{after}")] = None
    relay = graph.relay()
    for source, target in pairwise(relay):
        channels[Channel(source, target, "y")] = None
    return tuple(part for channel in channels for part in (channel, continued(channel)))
