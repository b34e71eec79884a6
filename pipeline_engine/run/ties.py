"""Tied parameters: one parameter of the model that several stages hold a copy of.

Each copy's own gradients are noted as they come.  At ``flush`` every rank that owns a copy adds the others' to its
own, so that all copies have the gradient that one process would have, and take the same step.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from attrs import define, field, frozen
from torch.utils.hooks import RemovableHandle

from pipeline_engine.errors import UsageError
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.values import Channel
from pipeline_engine.run import wire
from pipeline_engine.run.transports.base import Handle, Transport


@frozen(eq=False)
class Tie:
    """This rank's copies of a tied parameter, by the stage that uses them; made by ``tie``."""

    name: str
    parameters: Mapping[int, torch.nn.Parameter]


def tie(name: str, parameters: Mapping[int, torch.nn.Parameter]) -> Tie:
    """Name a parameter that several stages share, for ``Pipeline(..., ties=[...])``.

    Args:
        name: the same on all ranks.
        parameters: by stage, the copies of this rank; the other ranks name theirs.  Equal on all ranks at the start.

    Returns:
        What ``Pipeline`` takes.  Its gradients are summed at ``flush``, to 1e-6 of what one process computes.

    Raises:
        UsageError: no parameter is given, or they have different shapes.
    """
    if not parameters:
        raise UsageError(f"tie {name!r} names no parameter; leave it out on ranks that hold no copy.")
    if len({parameter.shape for parameter in parameters.values()}) > 1:
        raise UsageError(f"tie {name!r}: shapes {[list(p.shape) for p in parameters.values()]}; copies have one shape.")
    return Tie(name, dict(parameters))


@define(eq=False)
class _Copies:
    """One tie on this rank, and what its copies have been given since the last sum."""

    parameters: Sequence[torch.nn.Parameter]
    owners: Sequence[int]  # ranks that hold a copy, in the order of their first stage
    noted: dict[torch.nn.Parameter, torch.Tensor] = field(init=False, factory=dict)
    before: dict[torch.nn.Parameter, torch.Tensor] = field(init=False, factory=dict)  # gradients before those
    hooks: list[RemovableHandle] = field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        for parameter in self.parameters:
            self.hooks.append(parameter.register_hook(partial(self._note, parameter)))  # type: ignore[no-untyped-call]

    def _note(self, parameter: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """A gradient is about to be accumulated."""
        self._forget_if_dropped(parameter)
        known = self.noted.get(parameter)
        self.noted[parameter] = grad.detach().clone() if known is None else known + grad
        if known is None and parameter.grad is not None:
            self.before[parameter] = parameter.grad.clone()

    def _forget_if_dropped(self, parameter: torch.nn.Parameter) -> None:
        """What ``zero_grad`` has dropped since it was noted is in no sum."""
        if parameter.grad is None:
            self.noted.pop(parameter, None)
            self.before.pop(parameter, None)

    def own(self) -> torch.Tensor | None:
        """The sum over this rank's copies."""
        for parameter in self.parameters:
            self._forget_if_dropped(parameter)
        return _sum([self.noted[parameter] for parameter in self.parameters if parameter in self.noted])

    def accumulate(self, total: torch.Tensor | None) -> None:
        """Put the sum over all copies in the place of what each copy was given; all copies end up equal to the bit."""
        for parameter in self.parameters:
            before = self.before.get(parameter) if parameter in self.noted else parameter.grad
            grads = [grad.to(parameter) for grad in (before, total) if grad is not None]
            parameter.grad = _sum(grads)
        self.noted.clear()
        self.before.clear()


def _sum(grads: Sequence[torch.Tensor]) -> torch.Tensor | None:
    return sum(grads[1:], start=grads[0].clone()) if grads else None


@define(eq=False)
class Ties:
    """All ties of a pipeline, in one order on all ranks."""

    transport: Transport
    deadline: float
    _copies: Mapping[str, _Copies]
    channels: tuple[Channel, ...]
    _number: int = field(init=False, default=0)

    @classmethod
    def agree(cls, ties: Iterable[Tie], graph: StageGraph, transport: Transport, *, deadline: float) -> Ties:
        """Find out which ranks hold copies of what.  Collective.

        Raises:
            UsageError: a stage is not this rank's, a name is used twice, or ranks name different shapes.
        """
        own = _by_name(ties, graph, transport.rank)
        if not own and transport.num_ranks == 1:
            return cls(transport, deadline, {}, ())
        shapes = {
            name: {stage: tuple(parameter.shape) for stage, parameter in parameters.items()}
            for name, parameters in own.items()
        }
        said = [pickle.loads(word) for word in transport.exchange(pickle.dumps(shapes), deadline=deadline)]
        owners = _owners(said, graph)
        channels = [
            Channel(source, target, f"t{number}")
            for number, ranks in enumerate(owners.values())
            for source in ranks
            for target in ranks
            if source != target
        ]
        copies = {
            name: _Copies(tuple(dict.fromkeys(own[name].values())), ranks)
            for name, ranks in owners.items()
            if name in own
        }
        return cls(transport, deadline, {name: copies.get(name, _Copies((), ())) for name in owners}, tuple(channels))

    def add_up(self, number: int) -> None:
        """Sum the gradients of all ties over their owners.  Every rank calls it at the same point.

        Args:
            number: tells this sum from all others; the same on all ranks.
        """
        self._number = number
        for number, copies in enumerate(self._copies.values()):
            if copies.parameters:
                copies.accumulate(_sum(self._exchange(number, copies)))

    def close(self) -> None:
        """Take no more notes; a parameter may be tied again in another pipeline."""
        for copies in self._copies.values():
            while copies.hooks:
                copies.hooks.pop().remove()

    def _exchange(self, number: int, copies: _Copies) -> list[torch.Tensor]:
        """What every owner's copies were given, in the order of the owners."""
        rank, own = self.transport.rank, copies.own()
        parameter = copies.parameters[0]
        room = wire.FIRST_BYTES + parameter.numel() * parameter.element_size()
        others = [owner for owner in copies.owners if owner != rank]
        incoming = [Channel(owner, rank, f"t{number}") for owner in others]
        outgoing = [Channel(rank, owner, f"t{number}") for owner in others]
        posted = [self.transport.receive(channel, room) for channel in incoming]
        sent = [self._send(channel, number, own, room) for channel in outgoing]
        for handle in (*posted, *sent):
            self.transport.wait(handle, deadline=self.deadline)
        given = {
            channel.source: wire.Arrived.opened(handle.buffer, self._stamp(number, channel)).grads()[0]
            for channel, handle in zip(incoming, posted, strict=True)
        } | {rank: own}
        return [grad for owner in copies.owners if (grad := given[owner]) is not None]

    def _send(self, channel: Channel, number: int, own: torch.Tensor | None, room: int) -> Handle:
        (message,) = wire.encode_grads((own,), self._stamp(number, channel), limit=room)
        return self.transport.send(channel, message, room=room)

    def _stamp(self, number: int, channel: Channel) -> wire.Stamp:
        return wire.Stamp(number, self._number, channel=wire.number_of(channel), place=self._number)


def _by_name(ties: Iterable[Tie], graph: StageGraph, rank: int) -> dict[str, Mapping[int, torch.nn.Parameter]]:
    own: dict[str, Mapping[int, torch.nn.Parameter]] = {}
    for each in ties:
        if each.name in own:
            raise UsageError(f"tie {each.name!r} is given twice on rank {rank}; name all its copies in one tie.")
        if foreign := sorted(set(each.parameters) - set(graph.stages_of(rank))):
            raise UsageError(f"tie {each.name!r} names stage {foreign[0]}, which is not on rank {rank}.")
        own[each.name] = each.parameters
    return own


def _owners(said: Sequence[Mapping[str, Mapping[int, tuple[int, ...]]]], graph: StageGraph) -> dict[str, list[int]]:
    """By name, the ranks that hold a copy, in the order of their first stage."""
    shapes: dict[str, dict[int, tuple[int, ...]]] = {}
    for word in said:
        for name, by_stage in word.items():
            shapes.setdefault(name, {}).update(by_stage)
    for name, by_stage in shapes.items():
        if len(set(by_stage.values())) > 1:
            raise UsageError(f"tie {name!r} has shapes {by_stage} by stage; all copies have one shape.")
    return {
        name: list(dict.fromkeys(graph.rank_of[stage] for stage in sorted(by_stage)))
        for name, by_stage in sorted(shapes.items())
    }
