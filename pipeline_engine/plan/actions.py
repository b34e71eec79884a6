"""Actions: the ten verbs of a program, what each needs and makes.

    2F0              Forward             send:x[0,1]>1    Send
    2B0              Backward            sent:x[0,1]>1    WaitSend
    2I0              BackwardInput       post:x[0,1]<0    PostRecv
    2W0              BackwardWeight      recv:x[0,1]<0    WaitRecv
    publish:y[0]     Publish             yield:y[0]       Yield

``needs`` and ``makes`` state the law once; the checker, the transfers, the simulator and the executor only ask them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

from attrs import Attribute, field, frozen

from pipeline_engine.errors import ScheduleError
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.values import Activation, InputGrad, Output, OutputGrad, Value, check_number, parse_value

_TRAVELS = (Activation, InputGrad, Output)


def _check_travels(owner: object, attribute: Attribute[Any], value: object) -> None:
    if type(value) not in _TRAVELS:
        raise ScheduleError(f"{type(owner).__name__}: {value!r} does not travel; x[..], dx[..] and y[..] do.")


@frozen(cache_hash=True)
class _OnStage:
    letter: ClassVar[str]
    stage: int = field(validator=check_number)
    microbatch: int = field(validator=check_number)

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}{self.microbatch}"


@frozen(cache_hash=True)
class Forward(_OnStage):
    """Run one stage on one microbatch and keep what its backward needs.

    Roughly: ``x[stage, m] = module[stage](*(x[s, m] for s in before(stage)))``
    """

    letter = "F"


@frozen(cache_hash=True)
class Backward(_OnStage):
    """Run the whole backward of one stage on one microbatch: ``dx[stage, m]`` and the parameters' gradients."""

    letter = "B"


@frozen(cache_hash=True)
class BackwardInput(_OnStage):
    """The first half of a split backward: only ``dx[stage, m]``, which the stage before waits for."""

    letter = "I"


@frozen(cache_hash=True)
class BackwardWeight(_OnStage):
    """The second half of a split backward: only the parameters' gradients."""

    letter = "W"


@frozen(cache_hash=True)
class Send:
    """Start sending a value; its buffer stays in use until ``WaitSend``."""

    value: Value = field(validator=_check_travels)
    to_rank: int = field(validator=check_number)

    def __str__(self) -> str:
        return f"send:{self.value}>{self.to_rank}"


@frozen(cache_hash=True)
class WaitSend:
    """Wait until a value that was sent has left, and free its buffer."""

    value: Value = field(validator=_check_travels)
    to_rank: int = field(validator=check_number)

    def __str__(self) -> str:
        return f"sent:{self.value}>{self.to_rank}"


@frozen(cache_hash=True)
class PostRecv:
    """Post the receive of a value, so that its sender can complete."""

    value: Value = field(validator=_check_travels)
    from_rank: int = field(validator=check_number)

    def __str__(self) -> str:
        return f"post:{self.value}<{self.from_rank}"


@frozen(cache_hash=True)
class WaitRecv:
    """Wait until a value whose receive is posted has arrived."""

    value: Value = field(validator=_check_travels)
    from_rank: int = field(validator=check_number)

    def __str__(self) -> str:
        return f"recv:{self.value}<{self.from_rank}"


@frozen(cache_hash=True)
class Publish:
    """Make the caller's copy of an output from what the last stage returned."""

    microbatch: int = field(validator=check_number)

    def __str__(self) -> str:
        return f"publish:y[{self.microbatch}]"


@frozen(cache_hash=True)
class Yield:
    """Hand an output to the caller, who may give its gradient back."""

    microbatch: int = field(validator=check_number)

    def __str__(self) -> str:
        return f"yield:y[{self.microbatch}]"


Compute: TypeAlias = Forward | Backward | BackwardInput | BackwardWeight
Action: TypeAlias = Compute | Send | WaitSend | PostRecv | WaitRecv | Publish | Yield
Program: TypeAlias = tuple[Action, ...]

BACKWARD = (Backward, BackwardInput, BackwardWeight)
COMPUTE = (Forward, *BACKWARD)

_STAGED: dict[str, Callable[[int, int], Compute]] = {verb.letter: verb for verb in COMPUTE}
_TO: dict[str, Callable[[Value, int], Action]] = {"send": Send, "sent": WaitSend}
_FROM: dict[str, Callable[[Value, int], Action]] = {"post": PostRecv, "recv": WaitRecv}
_HANDED: dict[str, Callable[[int], Action]] = {"publish": Publish, "yield": Yield}
_PATTERN = re.compile(
    r"(\d+)([FBIW])(\d+)|(send|sent):((?:d?x|y)\[.+)>(\d+)|(post|recv):((?:d?x|y)\[.+)<(\d+)|(publish|yield):y\[(\d+)\]",
    re.ASCII,
)


def parse_action(text: str) -> Action:
    """Read an action back from its ``str``; the whole text must match.

    Raises:
        ScheduleError: the text is not an action.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ScheduleError(f"{text!r} is not an action; expected for example 2F0, 2B0, send:x[0,1]>1 or yield:y[0].")
    stage, letter, microbatch, out, sent, target, into, received, source, hand, output = match.groups()
    if letter:
        return _STAGED[letter](int(stage), int(microbatch))
    if out:
        return _TO[out](parse_value(sent), int(target))
    if into:
        return _FROM[into](parse_value(received), int(source))
    return _HANDED[hand](int(output))


def needs(action: Action, graph: StageGraph) -> tuple[Value, ...]:
    """Values that must be on the action's rank before it."""
    match action:
        case Forward(stage, m):
            return tuple(Activation(before, m) for before in graph.before(stage))
        case Backward(stage, m) | BackwardInput(stage, m):
            return (Activation(stage, m), *_incoming_grads(stage, m, graph))
        case BackwardWeight(stage, m):
            return (InputGrad(stage, m),)
        case Publish(m):
            return (Activation(graph.last_stage, m),)
        case Yield(m):
            return (Output(m),)
        case Send(value, _):
            return (value,)
        case _:
            return ()


def _incoming_grads(stage: int, m: int, graph: StageGraph) -> tuple[Value, ...]:
    if stage == graph.last_stage:
        return (OutputGrad(m),)
    return tuple(InputGrad(after, m) for after in graph.after(stage))


def makes(action: Action) -> tuple[Value, ...]:
    """Values that are on the action's rank after it and were not before."""
    match action:
        case Forward(stage, m):
            return (Activation(stage, m),)
        case Backward(stage, m) | BackwardInput(stage, m):
            return (InputGrad(stage, m),)
        case Publish(m):
            return (Output(m),)
        case Yield(m):
            return (OutputGrad(m),)
        case WaitRecv(value, _):
            return (value,)
        case _:
            return ()


def maker_of(value: Value, graph: StageGraph) -> int:
    """The rank that makes ``value`` by computing it."""
    match value:
        case Activation(stage, _) | InputGrad(stage, _):
            return graph.rank_of[stage]
        case Output() | OutputGrad():
            return graph.rank_of[graph.last_stage]


def takers_of(value: Value, graph: StageGraph) -> tuple[int, ...]:
    """The other ranks whose stages need ``value``, each once, in stage order.  Outputs travel by relay instead."""
    match value:
        case Activation(stage, _):
            stages = graph.after(stage)
        case InputGrad(stage, _):
            stages = graph.before(stage)
        case _:
            stages = ()
    own = maker_of(value, graph)
    return tuple(dict.fromkeys(graph.rank_of[stage] for stage in stages if graph.rank_of[stage] != own))


def suppliers_of(value: InputGrad, rank: int, graph: StageGraph) -> tuple[int, ...]:
    """The stages on ``rank`` whose output's gradient is part of ``value``, in the order of the stage's arguments."""
    return graph.suppliers(value.stage, rank)


def sized_by(value: Value, rank: int, graph: StageGraph) -> tuple[Value, ...]:
    """Values that ``rank`` must have seen before it can post the receive of ``value``.

    A gradient is as large as what it is the gradient of; nothing else is known of a message before it comes.
    """
    if not isinstance(value, InputGrad):
        return ()
    return tuple(Activation(stage, value.microbatch) for stage in suppliers_of(value, rank, graph))
