"""Costs: how long every action takes, and how long every message travels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import Attribute, field, frozen

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.actions import Action, Backward, BackwardInput, BackwardWeight, Forward, Yield
from pipeline_engine.plan.values import Channel

PerStage = float | tuple[float, ...]
"""One number, or one for each stage."""

PerChannel = float | tuple[tuple[str, float], ...]
"""One number, or one for each channel or kind of value by name."""


def _per_stage(value: float | Sequence[float]) -> PerStage:
    return float(value) if isinstance(value, (int, float)) else tuple(float(each) for each in value)


def _weights(weights: Iterable[float]) -> tuple[float, ...]:
    return tuple(weights)


def _per_channel(value: float | Mapping[str, float] | Sequence[tuple[str, float]]) -> PerChannel:
    if isinstance(value, (int, float)):
        return float(value)
    return tuple(sorted((str(name), float(number)) for name, number in dict(value).items()))


def _check_cost(_: object, attribute: Attribute[Any], value: PerStage) -> None:
    for each in value if isinstance(value, tuple) else (value,):
        _check_number(f"Costs.{attribute.name}", each)


def _check_channels(_: object, attribute: Attribute[Any], value: PerChannel) -> None:
    if not isinstance(value, tuple):
        return _check_number(f"Costs.{attribute.name}", value)
    for name, each in value:
        _check_number(f"Costs.{attribute.name}[{name!r}]", each)


def _check_number(place: str, number: float) -> None:
    if not number >= 0 or math.isinf(number):
        raise ScheduleError(f"{place} is {number}; a cost is a finite number of seconds, 0 or more.")


@frozen
class Costs:
    """What actions and messages cost, in seconds.

    A number by channel is a mapping: ``{"x0:0>1": .., "dx": ..}`` names a channel, or all channels of one kind of
    value: ``x`` forwards, ``dx`` backwards, ``y`` outputs.  The channel's own name counts first; what is not named
    costs nothing.

    Args:
        forward: one forward; a number, or one for each stage.
        backward_input: the half of a backward that makes the input gradient; a number, or one for each stage.
        backward_weight: the other half; a whole backward costs both.
        loss: the caller's code between a yield and the end of its backward call, without the stages' backwards.
        latency: from a send to the earliest arrival; a number, or one by channel.
        seconds_per_byte: added to the latency for each of ``num_bytes``.
        num_bytes: size of one message of a microbatch of weight 1; a number, or one by channel.
        weights: relative cost of each microbatch; empty means 1 for each.

    Raises:
        ScheduleError: a cost is negative, infinite or not a number.
    """

    forward: PerStage = field(default=1.0, converter=_per_stage, validator=_check_cost)
    backward_input: PerStage = field(default=1.0, converter=_per_stage, validator=_check_cost)
    backward_weight: PerStage = field(default=1.0, converter=_per_stage, validator=_check_cost)
    loss: float = field(default=0.0, converter=float, validator=_check_cost)
    latency: PerChannel = field(default=0.0, converter=_per_channel, validator=_check_channels)
    seconds_per_byte: float = field(default=0.0, converter=float, validator=_check_cost)
    num_bytes: PerChannel = field(default=0.0, converter=_per_channel, validator=_check_channels)
    weights: tuple[float, ...] = field(default=(), converter=_weights, validator=_check_cost)

    def of(self, action: Action) -> float:
        """Seconds that ``action`` keeps its rank busy.

        Raises:
            ScheduleError: costs are given for fewer stages or microbatches.
        """
        match action:
            case Forward(stage, m):
                return self._at(self.forward, stage) * self.weight(m)
            case Backward(stage, m):
                whole = self._at(self.backward_input, stage) + self._at(self.backward_weight, stage)
                return whole * self.weight(m)
            case BackwardInput(stage, m):
                return self._at(self.backward_input, stage) * self.weight(m)
            case BackwardWeight(stage, m):
                return self._at(self.backward_weight, stage) * self.weight(m)
            case Yield():
                return self.loss
            case _:
                return 0.0

    def travel(self, channel: Channel) -> tuple[float, float]:
        """Seconds that a message of ``channel`` travels: whatever its size, and for each unit of weight."""
        return _on(self.latency, channel), self.seconds_per_byte * _on(self.num_bytes, channel)

    @property
    def transfer(self) -> float:
        """Seconds from a send to its arrival, at most, for a microbatch of weight 1."""
        return _largest(self.latency) + self.seconds_per_byte * _largest(self.num_bytes)

    def weight(self, microbatch: int) -> float:
        """The relative cost of ``microbatch``, of the unit that all costs are given for.

        Raises:
            ScheduleError: weights are given, and none for this one.
        """
        if not self.weights:
            return 1.0
        if microbatch >= len(self.weights):
            raise ScheduleError(f"weights are given for {len(self.weights)} microbatches, there is a {microbatch}.")
        return self.weights[microbatch]

    @staticmethod
    def _at(cost: PerStage, stage: int) -> float:
        if not isinstance(cost, tuple):
            return cost
        if stage >= len(cost):
            raise ScheduleError(f"costs are given for {len(cost)} stages, but there is a stage {stage}.")
        return cost[stage]


def _on(number: PerChannel, channel: Channel) -> float:
    if not isinstance(number, tuple):
        return number
    named = dict(number)
    return named.get(str(channel), named.get(channel.name.rstrip("0123456789"), 0.0))


def _largest(number: PerChannel) -> float:
    return max((each for _, each in number), default=0.0) if isinstance(number, tuple) else number
