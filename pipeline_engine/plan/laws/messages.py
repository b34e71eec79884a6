"""Messages, laws 4 and 5: sends and receives name the same values in one order, and each is waited for once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.actions import Action, PostRecv, Send, WaitRecv, WaitSend
from pipeline_engine.plan.schedule import Schedule
from pipeline_engine.plan.values import Value, channel_of

_Pending = dict[tuple[Value, int], int]
"""By value and peer: the step at which it was started."""


def check_pairs(schedule: Schedule) -> None:
    """Law 5, first part: each send has its wait, each post its receive, exactly once and in that order."""
    for rank, program in enumerate(schedule.programs):
        sends: _Pending = {}
        posts: _Pending = {}
        for step, action in enumerate(program):
            kind = type(action)
            if kind is Send:
                _start(sends, (action.value, action.to_rank), rank, step, action)  # type: ignore[union-attr]
            elif kind is PostRecv:
                _start(posts, (action.value, action.from_rank), rank, step, action)  # type: ignore[union-attr]
            elif kind is WaitSend:
                _end(sends, (action.value, action.to_rank), rank, step, action)  # type: ignore[union-attr]
            elif kind is WaitRecv:
                _end(posts, (action.value, action.from_rank), rank, step, action)  # type: ignore[union-attr]
        for (value, peer), step in (sends | posts).items():
            raise ScheduleError(
                f"rank {rank} step {step}   {program[step]}: {value} (rank {peer}) is never waited for; "
                "what is sent or posted is waited for exactly once."
            )


def _start(pending: _Pending, message: tuple[Value, int], rank: int, step: int, action: Action) -> None:
    if pending.setdefault(message, step) != step:
        raise ScheduleError(f"rank {rank} step {step}   {action}: the same was started in step {pending[message]}.")


def _end(pending: _Pending, message: tuple[Value, int], rank: int, step: int, action: Action) -> None:
    if pending.pop(message, None) is None:
        raise ScheduleError(f"rank {rank} step {step}   {action}: there is nothing to wait for.")


def check_order(schedule: Schedule, *, tells_channels_apart: bool) -> None:
    """Law 4: sends and posted receives name the same values in the same order.

    Args:
        schedule: lowered.
        tells_channels_apart: on each channel; otherwise over all channels of an ordered pair of ranks together, as a
            transport without tags matches them.
    """
    way = _channel_key if tells_channels_apart else _pair_key
    sends: defaultdict[Hashable, list[tuple[Value, int, int]]] = defaultdict(list)
    posts: defaultdict[Hashable, list[tuple[Value, int, int]]] = defaultdict(list)
    for rank, program in enumerate(schedule.programs):
        for action in program:
            if type(action) is Send:
                sends[way(action.value, rank, action.to_rank)].append((action.value, rank, action.to_rank))
            elif type(action) is PostRecv:
                posts[way(action.value, action.from_rank, rank)].append((action.value, action.from_rank, rank))
    for key in sends.keys() | posts.keys():
        if sends[key] != posts[key]:
            raise ScheduleError(_mismatch(sends[key], posts[key]))


def _channel_key(value: Value, source: int, target: int) -> Hashable:
    return source, target, type(value), getattr(value, "stage", 0)


def _pair_key(value: Value, source: int, target: int) -> Hashable:
    return source, target


_Way = Callable[[Value, int, int], Hashable]


def _mismatch(sends: list[tuple[Value, int, int]], posts: list[tuple[Value, int, int]]) -> str:
    for place, (sent, posted) in enumerate(zip(sends, posts, strict=False)):
        if sent != posted:
            return (
                f"channel {channel_of(*sent)}: message {place} is sent as {sent[0]} and received as {posted[0]}; "
                "sends and receives of a channel have one order."
            )
    channel = channel_of(*(sends or posts)[0])
    return f"channel {channel}: {len(sends)} sends meet {len(posts)} receives."
