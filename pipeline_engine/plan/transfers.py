"""Transfers: turns what the ranks compute into what they post, send, wait for and hand out.

``Transfers`` is told of computing actions one by one, in an order in which each one's needs are made.  At the end of
a batch it returns every rank's part of it, with receives posted ahead of their use.

Note [one send per value]: a value travels to a rank once, whatever number of stages there need it.

Note [proven sends]: ``WaitSend`` stands where it cannot block: after a value has come back that the peer sent after
it had received ours.  From a rank that no edge joins with ours nothing comes back: an output for it is waited for
after further outputs, twice as many as there are ranks, by when it has long been read.

Note [one rank's traffic]: a rank that writes only its own part still follows its peers' messages from and to itself,
for they tell when its sends are proven; those between its peers it need not know.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection

from pipeline_engine.plan.actions import Compute, Program, Publish
from pipeline_engine.plan.drafts import AHEAD as AHEAD
from pipeline_engine.plan.drafts import Draft, Message
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.numbering import numbering_of
from pipeline_engine.plan.values import Activation, Channel, InputGrad, Output, continued

Batch = tuple[Program, ...]
"""For each rank, the actions that one event adds to its program."""


class Transfers:
    """The traffic of one call.

    Args:
        graph: the stage graph.
        hand_out: whether outputs travel to every rank; otherwise only the last stage's rank has them.
        rank: whose part of the batches is written, the others' stay empty; None for all.
    """

    def __init__(self, graph: StageGraph, *, hand_out: bool, rank: int | None = None) -> None:
        self._numbering = numbering_of(graph)
        self._width = self._numbering.width
        self._output = self._numbering.offset(Output(0))
        self._written = frozenset(range(graph.num_ranks) if rank is None else [rank])
        self._drafts = [Draft() if rank in self._written else None for rank in range(graph.num_ranks)]
        self._ways = self._ways_of_outputs(graph, hand_out)
        self._joined = {frozenset((graph.rank_of[before], graph.rank_of[after])) for before, after in graph.edges}
        self._handed: deque[list[Message]] = deque()  # by output, messages to ranks from which nothing comes back
        self._unread: list[dict[int, Message]] = [{} for _ in self._drafts]  # sent, not waited for there: by number
        self._unsent: list[dict[Message, None]] = [{} for _ in self._drafts]  # sent from there, not waited for
        self._read: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)  # (reader, sender): not yet told

    def compute(self, rank: int, action: Compute) -> None:
        """Add a computing action, what it waits for and what it sends."""
        rule = self._numbering.rules[type(action)][action.stage]
        base = action.microbatch * self._width
        for offset in rule.arrives:
            if message := self._unread[rank].pop(base + offset, None):
                self._receive(rank, message)
        if draft := self._drafts[rank]:
            draft.compute(action)
        for travel in rule.travels:
            if rank not in self._written and travel.target not in self._written:
                continue
            value = travel.kind(travel.stage, action.microbatch)
            sizes = [base + offset for offset in travel.sized_by]
            self._send(value, base + travel.offset, rank, travel.target, sizes)

    def hand_out(self, microbatch: int) -> None:
        """Bring an output to every rank, hop by hop, and yield it there."""
        self._end_computing()
        number = microbatch * self._width + self._output
        unanswered: list[Message] = []
        for rank, targets in self._ways.items():
            draft = self._drafts[rank]
            if message := self._unread[rank].pop(number, None):
                self._receive(rank, message)
            elif draft:
                draft.actions.append(Publish(microbatch))
            for target in targets:
                if draft or target in self._written:
                    message = self._send(Output(microbatch), number, rank, target, [])
                    if frozenset((rank, target)) not in self._joined:
                        unanswered.append(message)
        self._wait_for_old_outputs(unanswered)
        for rank in self._ways:
            if draft := self._drafts[rank]:
                draft.hand_out(microbatch)

    def drain(self) -> None:
        """Wait for everything that is still on its way, needed or not."""
        self._end_computing()
        for rank, unread in enumerate(self._unread):
            for message in unread.values():
                self._receive(rank, message)
            unread.clear()
        for draft, unsent in zip(self._drafts, self._unsent, strict=True):
            for message in unsent:
                if draft:
                    draft.wait_send(message)
            unsent.clear()

    def forget(self, numbers: Collection[int]) -> None:
        """Wait for what is on its way of these values, so that they can be sent once more."""
        for rank, unread in enumerate(self._unread):
            for number in [number for number in unread if number in numbers]:
                self._receive(rank, unread.pop(number))
        for unsent in self._unsent:
            for message in [message for message in unsent if message.number in numbers]:
                self._wait_send(message)

    def end_batch(self) -> Batch:
        """Every written rank's actions since the last batch."""
        batch = tuple(draft.finish() if draft and draft.is_begun else () for draft in self._drafts)
        for rank in self._written:
            if (draft := self._drafts[rank]) and draft.is_begun:
                self._drafts[rank] = Draft()
        return batch

    def _end_computing(self) -> None:
        for rank in self._written:
            if draft := self._drafts[rank]:
                draft.end_computing()

    def _send(
        self, value: Activation | InputGrad | Output, number: int, source: int, target: int, sizes: list[int]
    ) -> Message:
        message = Message(value, number, source, target, self._read.pop((source, target), []))
        self._unread[target][number] = message
        if draft := self._drafts[source]:
            draft.send(message)
            self._unsent[source][message] = None
        if draft := self._drafts[target]:
            draft.expect(message, sizes)
        return message

    def _receive(self, rank: int, message: Message) -> None:
        self._read[rank, message.source].append(message)
        if draft := self._drafts[rank]:
            draft.receive(message)
            for sent in message.proves:
                self._wait_send(sent)
        message.proves.clear()  # or each message would keep all before it alive

    def _wait_for_old_outputs(self, unanswered: list[Message]) -> None:
        """See Note [proven sends]."""
        self._handed.append(unanswered)
        if len(self._handed) > 2 * len(self._drafts):
            for message in self._handed.popleft():
                self._wait_send(message)

    def _wait_send(self, message: Message) -> None:
        draft, unsent = self._drafts[message.source], self._unsent[message.source]
        if draft and message in unsent:
            del unsent[message]
            draft.wait_send(message)

    def _ways_of_outputs(self, graph: StageGraph, hand_out: bool) -> dict[int, list[int]]:
        """The ranks that an output reaches, in order, each with those that get it from there.

        A rank that writes only its own part needs to know of the one before it and of those after it.
        """
        ways: dict[int, list[int]] = {graph.relay()[0]: []}
        if not hand_out:
            return ways
        for source, target in graph.deliveries():
            ways[source].append(target)
            ways[target] = []
        reached = {target for rank in self._written for target in ways.get(rank, ())}
        known = self._written | reached
        return {rank: targets for rank, targets in ways.items() if rank in known or not known.isdisjoint(targets)}


def channels_of(graph: StageGraph) -> tuple[Channel, ...]:
    """Every channel that a run over ``graph`` can use, in one order on all ranks."""
    channels: dict[Channel, None] = {}
    for before, after in graph.edges:
        source, target = graph.rank_of[before], graph.rank_of[after]
        if source != target:
            channels[Channel(source, target, f"x{before}")] = None
            channels[Channel(target, source, f"dx{after}")] = None
    for source, target in graph.deliveries():
        channels[Channel(source, target, "y")] = None
    return tuple(part for channel in channels for part in (channel, continued(channel)))
