"""Words: what every rank says in an exchange, gathered by one and told to all.

Note [one gathers]: rank 0 hears every rank and, once all have spoken, tells them all words at once.  So an exchange is
2(P - 1) messages and wakes each other rank once; rank 0, where most pipelines begin, goes on before all others.
Whoever has waited for long, or has just left a loop, tells his word to all, early: by it they see that he is in an
exchange which they are not in, and those who are in it know whom they wait for.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Sequence

from attrs import Factory, define


@define(eq=False)
class Words:
    """What this rank has heard; an exchange is known by its epoch and its number."""

    num_ranks: int
    _gathered: dict[tuple[int, int], dict[int, bytes]] = Factory(lambda: defaultdict(dict))  # on rank 0 only
    _complete: dict[tuple[int, int], Sequence[bytes]] = Factory(dict)
    _early: dict[int, tuple[tuple[int, int], bytes]] = Factory(dict)  # by rank, the last one

    def gather(self, exchange: tuple[int, int], rank: int, word: bytes) -> bytes:
        """Rank 0 hears a word; of the last one, what is to be told to all others and then learnt; else nothing."""
        gathered = self._gathered[exchange]
        gathered[rank] = word
        if len(gathered) < self.num_ranks:
            return b""
        same: dict[bytes, bytes] = {}  # mostly all ranks say the same; once in memory, once in the message
        return pickle.dumps([same.setdefault(gathered[rank], gathered[rank]) for rank in range(self.num_ranks)])

    def learn(self, exchange: tuple[int, int], told: bytes) -> None:
        """Hear what rank 0 has gathered; itself it does so last, since it may end right afterwards.

        Until then what it has gathered stands: if Ctrl-C comes while it tells, its next try tells all again.
        """
        self._complete[exchange] = pickle.loads(told)
        self._gathered.pop(exchange, None)

    def are_complete(self, exchange: tuple[int, int]) -> bool:
        """Whether all that was said in an exchange is here."""
        return exchange in self._complete

    def said(self, exchange: tuple[int, int]) -> Sequence[bytes]:
        """What every rank has said in an exchange that is complete, in rank order."""
        return self._complete[exchange]

    def drop(self, exchange: tuple[int, int]) -> None:
        """It is over."""
        for rank in [rank for rank, (early, _) in self._early.items() if early == exchange]:
            self._early.pop(rank, None)
        self._complete.pop(exchange, None)

    def hear_early(self, exchange: tuple[int, int], rank: int, word: bytes) -> None:
        """A rank has waited for long."""
        self._early[rank] = (exchange, word)

    def early(self, exchange: tuple[int, int]) -> list[tuple[int, bytes]]:
        """Who is known to wait for long in an exchange, and his word; never blocks, and takes no lock."""
        return [(rank, word) for rank, (early, word) in self._early.copy().items() if early == exchange]

    @property
    def some_are_early(self) -> bool:
        """Whether anybody waits for long in an exchange that is not over here; never blocks, and takes no lock."""
        return bool(self._early)

    def unheard(self, exchange: tuple[int, int]) -> list[int]:
        """Ranks of which it is not known that they have spoken."""
        if exchange in self._complete:
            return []
        heard = {*self._gathered.get(exchange, ()), *(rank for rank, _ in self.early(exchange))}
        return [rank for rank in range(self.num_ranks) if rank not in heard]

    def forget(self, epoch: int) -> None:
        """Drop what was said in this epoch and before."""
        for known in (self._gathered, self._complete):
            for exchange in [exchange for exchange in known if exchange[0] <= epoch]:
                del known[exchange]
        self._early = {rank: early for rank, early in self._early.items() if early[0][0] > epoch}
