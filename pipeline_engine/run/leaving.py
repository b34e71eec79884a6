"""Leaving: a caller who has left his loop on one rank, while another rank's caller waits for a later item of it.

A break at the same item on all ranks is lawful, and so is any code of the caller after it.  But whoever asks for an
item that another rank's caller will never take has found a disagreement, and need not wait for the deadline.
"""

from __future__ import annotations

import json

from attrs import asdict, frozen

from pipeline_engine.run.transports.base import Failure

_SIGN = b"departure "


@frozen
class Departure:
    """A loop that a rank's caller has left.

    Attributes:
        call, entry: the loop.
        items: how many he took.
        last: the caller's number of the last one.
    """

    call: int
    entry: str
    items: int
    last: int

    def packed(self) -> bytes:
        return _SIGN + json.dumps(asdict(self)).encode()


def missed(peer: int, word: bytes, rank: int, wanted: tuple[int, int] | None, item: int) -> Failure | None:
    """Whether a rank has left its loop before the item that this rank's caller waits for.

    Args:
        peer: the rank.
        word: what it says; need not be a departure.
        rank: this rank.
        wanted: number of the call, and the item's place in it; None while the caller waits for no item.
        item: the caller's number of that item.
    """
    if wanted is None or not word.startswith(_SIGN):
        return None
    left = Departure(**json.loads(word[len(_SIGN) :]))
    call, place = wanted
    if call != left.call or place < left.items:
        return None
    cause = (
        f"it left the loop over {left.entry} (call {call}) after item {left.last}; rank {rank} waits for item {item}"
    )
    return Failure(peer, "the caller's code", cause, "")
