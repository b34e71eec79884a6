"""The lookout: answers for a pipeline while its own thread blocks: what it does, and whether a peer has strayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from pipeline_engine.run.agreement import strayed
from pipeline_engine.run.call import Call
from pipeline_engine.run.doing import Doing
from pipeline_engine.run.leaving import missed
from pipeline_engine.run.transports.base import Failure


@frozen(eq=False)
class Lookout:
    """A transport's ``Host``.

    Args:
        rank: this rank.
        doing: the record of this rank.
        calls: those that are not over.
    """

    rank: int
    doing: Doing
    calls: Callable[[], Sequence[Call]]

    def state(self) -> bytes:
        return self.doing.state()

    def judge(self, peer: int, word: bytes) -> Failure | None:
        past = {call.number: (call.history.marks, call.summary) for call in self.calls()}
        return strayed(peer, word, past) or missed(peer, word, self.rank, self.doing.wanted, self.doing.item)
