"""Agreement: before the first tensor of a call moves, all ranks find out whether they mean the same."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from types import NoneType
from typing import Any, NoReturn

import torch
from attrs import field, frozen
from torch.utils import _pytree as pytree

from pipeline_engine.errors import TransportError, UsageError
from pipeline_engine.run.microbatch import Microbatch
from pipeline_engine.run.transports.base import Failure, Transport

_SIGN = b"agreement "
_PLAIN = (torch.Tensor, int, float, str, NoneType)  # leaves, told without the trouble of looking into them

Held = Mapping[int, Collection[int]]
"""By the number of a call, microbatches whose outputs some caller holds."""

UNKNOWN = "unknown"
"""In the place of what a rank need not know; nothing is compared with it."""


@frozen
class Word:
    """What one rank says.

    Attributes:
        entries: what must be the same on all ranks, by name; lists are compared by microbatch, dicts by key.
        past: by the number of a call that is not over, a mark of four bytes for each event of it.
        refusal: why this rank cannot make the call, if it cannot.
        counts: what this rank has counted; failures make ranks count differently, and the highest holds.
        held: what this rank's caller still holds, of calls that are not over.
    """

    entries: Mapping[str, object]
    past: Mapping[int, bytes]
    refusal: Failure | None
    counts: tuple[int, ...] = ()
    held: Held = field(factory=dict)


@frozen
class Agreed:
    """What all ranks know after they have spoken.

    Attributes:
        refusal: of the first rank that refuses, if any does.
        counts: the highest of each.
        held: what the caller of any rank holds.
    """

    refusal: Failure | None
    counts: tuple[int, ...]
    held: Held


def agree(transport: Transport, word: Word, *, deadline: float) -> Agreed:
    """Exchange ``word`` with all ranks.  Collective.

    Args:
        transport: the control plane.
        word: of this rank.
        deadline: seconds to wait for the slowest rank.

    Raises:
        UsageError: on every rank, if two ranks differ; the message shows both sides.
    """
    said = transport.exchange(_packed(word), deadline=deadline)
    words = [word] if len(set(said)) == 1 else [_unpacked(each) for each in said]
    counts = tuple(map(max, zip(*(each.counts for each in words), strict=True)))
    held = {call: {m for each in words for m in each.held.get(call, ())} for call in word.held}
    for refusal in (each.refusal for each in words):
        if refusal is not None:
            return Agreed(refusal, counts, held)
    names = dict.fromkeys(name for each in words for name in each.entries)
    for name in names if len(words) > 1 else ():
        _compare(name, {rank: each.entries.get(name) for rank, each in enumerate(words)})
    return Agreed(None, counts, held)


def _compare(name: str, said: Mapping[int, Any]) -> None:
    known = {rank: value for rank, value in said.items() if value != UNKNOWN}
    if all(value == known[min(known)] for value in known.values()):
        return
    kinds = {(type(value), len(value) if isinstance(value, list) else 0) for value in known.values()}
    match next(iter(kinds), None):
        case (kind, _) if kind is dict:
            for key in dict.fromkeys(key for value in known.values() for key in value):
                _compare(f"{name} {key!r}", {rank: value.get(key, UNKNOWN) for rank, value in known.items()})
        case (kind, length) if kind is list and len(kinds) == 1:
            for place in range(length):
                _compare(f"{name} of microbatch {place}", {rank: value[place] for rank, value in known.items()})
        case _:
            _refuse(name, known)


def _refuse(name: str, known: Mapping[int, object]) -> NoReturn:
    first = min(known)
    rank = next(rank for rank, value in known.items() if value != known[first])
    raise UsageError(
        f"ranks disagree on the {name}: rank {first} has {known[first]!r}, rank {rank} has {known[rank]!r}; "
        "every rank of a pipeline makes the same calls."
    )


def passed(microbatches: object) -> dict[str, object]:
    """Types and shapes of what the caller passed, by microbatch, as far as it is there without reading ahead.

    A rank that does not pass ``inputs``, or some name of ``shared``, does not know them.
    """
    if not isinstance(microbatches, list | tuple) or not all(isinstance(each, Microbatch) for each in microbatches):
        return {}
    names = dict.fromkeys(name for each in microbatches for name in each.shared)
    shared = {name: [_in_words(each.shared.get(name)) for each in microbatches] for name in names}
    return {"inputs": [_in_words(each.inputs) for each in microbatches], "shared": shared}


def _in_words(tree: Any) -> str:
    leaves = (tree,) if isinstance(tree, _PLAIN) else tree if _is_flat(tree) else pytree.tree_leaves(tree)
    return _described(tuple([(leaf.dtype, leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]))


@lru_cache(maxsize=4096)  # microbatches are mostly of few shapes
def _described(tensors: tuple[tuple[torch.dtype, torch.Size], ...]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in tensors) or UNKNOWN


def _is_flat(tree: Any) -> bool:
    return type(tree) is tuple and all(isinstance(each, _PLAIN) for each in tree)


def strayed(peer: int, word: bytes, past: Mapping[int, tuple[bytes, str]]) -> Failure | None:
    """Whether a rank has left a call that this rank is still in.

    It has if it goes into its next call while this rank has done more in the present one, or something else: what
    this rank waits for may then never come.

    Args:
        peer: the rank.
        word: what it says in the exchange that comes next here; need not be an agreement.
        past: this rank's calls by number, the marks of their events and a summary of them.
    """
    for number, theirs, entries in _past_in(word):
        marks, summary = past.get(number, (b"", ""))
        if not theirs.startswith(marks):
            cause = (
                f"it is in its next call, {entries.get('entry point')}, and has left call {number} after "
                f"{entries.get(f'history of call {number}')}; other ranks are still in it, after {summary}"
            )
            return Failure(peer, "the caller's code", cause, "")
    return None


def _past_in(word: bytes) -> Iterator[tuple[int, bytes, Mapping[str, object]]]:
    if word.startswith(_SIGN):
        said = _unpacked(word)
        yield from ((number, marks, said.entries) for number, marks in said.past.items())


def _packed(word: Word) -> bytes:
    return _SIGN + pickle.dumps(word)


@lru_cache(maxsize=16)  # a word that came early is looked at again and again
def _unpacked(text: bytes) -> Word:
    if not text.startswith(_SIGN):
        raise TransportError("a word came that agrees on no call: some rank is in another exchange than this one.")
    word = pickle.loads(text[len(_SIGN) :])
    assert isinstance(word, Word)
    return word
