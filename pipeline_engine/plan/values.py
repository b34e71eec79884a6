"""Values: what actions need and make, each with a name that is the same on every rank."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, TypeAlias

from attrs import Attribute, field, frozen, validators

from pipeline_engine.errors import ScheduleError


def check_number(owner: object, attribute: Attribute[Any], number: object) -> None:
    """A stage, microbatch or rank is numbered 0, 1, 2..; an attrs validator, written by hand for its speed.

    Raises:
        ScheduleError: ``number`` numbers nothing.
    """
    if type(number) is not int or number < 0:
        raise ScheduleError(f"{type(owner).__name__}: {attribute.name} is {number!r}; it is an int, 0 or more.")


@frozen(order=True, cache_hash=True)
class Activation:
    """What stage ``stage`` returned for a microbatch; written ``x[stage,microbatch]``."""

    stage: int = field(validator=check_number)
    microbatch: int = field(validator=check_number)

    def __str__(self) -> str:
        return f"x[{self.stage},{self.microbatch}]"


@frozen(order=True, cache_hash=True)
class InputGrad:
    """Gradient with respect to the inputs of stage ``stage``; written ``dx[stage,microbatch]``."""

    stage: int = field(validator=check_number)
    microbatch: int = field(validator=check_number)

    def __str__(self) -> str:
        return f"dx[{self.stage},{self.microbatch}]"


@frozen(order=True, cache_hash=True)
class Output:
    """What the caller is handed for a microbatch, on every rank; written ``y[microbatch]``."""

    microbatch: int = field(validator=check_number)

    def __str__(self) -> str:
        return f"y[{self.microbatch}]"


@frozen(order=True, cache_hash=True)
class OutputGrad:
    """Gradient of the caller's loss with respect to an output; written ``dy[microbatch]``."""

    microbatch: int = field(validator=check_number)

    def __str__(self) -> str:
        return f"dy[{self.microbatch}]"


Value: TypeAlias = Activation | InputGrad | Output | OutputGrad

_PATTERN = re.compile(r"(?:(d?x)\[(\d+),(\d+)\]|(d?y)\[(\d+)\])", re.ASCII)


def parse_value(text: str) -> Value:
    """Read a value back from its ``str``; the whole text must match.

    Raises:
        ScheduleError: the text is not a value.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ScheduleError(f"{text!r} is not a value; expected x[stage,microbatch], dx[..], y[microbatch] or dy[..].")
    staged, stage, microbatch, whole, index = match.groups()
    if staged is not None:
        return (Activation if staged == "x" else InputGrad)(int(stage), int(microbatch))
    return (Output if whole == "y" else OutputGrad)(int(index))


@frozen(order=True, cache_hash=True)
class Channel:
    """Ordered messages in one direction between two ranks, for one edge of the stage graph.

    ``name`` tells the channels of one ordered pair of ranks apart: ``"x2"`` carries activations of stage 2, ``"dx3"``
    input gradients of stage 3, ``"y"`` outputs, ``"t0"`` gradients of a tied parameter; a ``+`` marks the second part
    of messages whose size the receiver cannot know.
    """

    source: int = field(validator=check_number)
    target: int = field(validator=check_number)
    name: str = field(validator=validators.matches_re(r"(?:d?x\d+|y|t\d+)\+?"))

    def __attrs_post_init__(self) -> None:
        if self.source == self.target:
            raise ScheduleError(f"channel {self.name} joins rank {self.source} with itself; a channel joins two ranks.")

    def __str__(self) -> str:
        return f"{self.name}:{self.source}>{self.target}"


def channel_of(value: Value, source: int, target: int) -> Channel:
    """The channel on which ``value`` travels from rank ``source`` to rank ``target``."""
    match value:
        case Activation(stage=stage):
            return _channel(source, target, f"x{stage}")
        case InputGrad(stage=stage):
            return _channel(source, target, f"dx{stage}")
        case Output():
            return _channel(source, target, "y")
        case OutputGrad():
            raise ScheduleError(f"{value} never travels: every rank's caller computes it.")


def continued(channel: Channel) -> Channel:
    """The channel for what does not fit the first part of a message of ``channel``."""
    return _channel(channel.source, channel.target, f"{channel.name}+")


@cache
def _channel(source: int, target: int, name: str) -> Channel:
    return Channel(source, target, name)
