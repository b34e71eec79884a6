"""Reading: programs from text, from tables and from the action strings of torch.distributed.pipelining.

torch writes ``2F0``, ``2B0``, ``2I0`` and ``2W0`` as we do, and a pair that it overlaps as ``(0F1;3B0)OVERLAP_F_B``;
the two are read one after the other.  What it writes about parameters and messages has no place in a schedule here.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.actions import Action, Program, parse_action

_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_FOREIGN = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*", re.ASCII)
_CURES = {
    "UNSHARD": "parameters are the stage's own affair; leave it out",
    "RESHARD": "parameters are the stage's own affair; leave it out",
    "REDUCE_GRAD": "gradients are reduced after the call, by the caller; leave it out",
    "SEND_F": "messages are put in by lower(); leave it out",
    "RECV_F": "messages are put in by lower(); leave it out",
    "SEND_B": "messages are put in by lower(); leave it out",
    "RECV_B": "messages are put in by lower(); leave it out",
}


def programs_from_text(text: str) -> tuple[Program, ...]:
    """One program a line, actions separated by spaces.

    Raises:
        ScheduleError: a word is not an action; the message says where.
    """
    return _programs(line.split() for line in text.strip().splitlines())


def programs_from_csv(text: str) -> tuple[Program, ...]:
    """One program a row, one action a cell; an empty cell is an idle slot and is passed over.

    Raises:
        ScheduleError: a cell is not an action; the message says where.
    """
    return _programs(csv.reader(io.StringIO(text)))


def read_actions(word: str) -> list[Action]:
    """The actions that one word or cell stands for: one, or those of a pair.

    Raises:
        ScheduleError: the word is not an action, or one that a schedule here does not hold.
    """
    if pair := _PAIR.fullmatch(word):
        return [parse_action(each.strip()) for each in pair[1].split(";")]
    if foreign := _FOREIGN.fullmatch(word):
        raise ScheduleError(f"{word!r} is torch's {foreign[1]}: {_CURES[foreign[1]]}.")
    return [parse_action(word)]


def _programs(rows: Iterable[Sequence[str]]) -> tuple[Program, ...]:
    return tuple(tuple(_program(rank, row)) for rank, row in enumerate(rows))


def _program(rank: int, row: Sequence[str]) -> Iterator[Action]:
    words = [word.strip() for word in row if word.strip()]
    for step, word in enumerate(words):
        try:
            yield from read_actions(word)
        except ScheduleError as error:
            raise ScheduleError(f"rank {rank} step {step}: {error}") from None
