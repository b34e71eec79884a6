"""The executor: performs one rank's actions of one call, in order.  It is an interpreter and has no policy.

A call's values live here by name until their last reader has read them; what a forward leaves for its backward lives
here until that backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from itertools import islice
from typing import Any, assert_never

import torch
from attrs import define, evolve, field

from pipeline_engine.errors import DeadlineError, PeerFailedError
from pipeline_engine.plan.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    PostRecv,
    Program,
    Publish,
    Send,
    WaitRecv,
    WaitSend,
    Yield,
    suppliers_of,
)
from pipeline_engine.plan.graph import StageGraph
from pipeline_engine.plan.lifetimes import Reads, outlives_its_sends
from pipeline_engine.plan.values import Activation, Channel, InputGrad, Output, OutputGrad, Value
from pipeline_engine.run import wire
from pipeline_engine.run.buffers import Buffers
from pipeline_engine.run.cargo import Cargo, Grads, added
from pipeline_engine.run.doing import Doing, describe, report
from pipeline_engine.run.last_backward import LastBackward
from pipeline_engine.run.mailbox import Mailbox, failure_of
from pipeline_engine.run.microbatches import Microbatches
from pipeline_engine.run.randomness import RandomState, Turns, alone, carried, state_of
from pipeline_engine.run.split import WeightPart
from pipeline_engine.run.stage import Ran, StageFunction, run_forward
from pipeline_engine.run.tracing import Recording

# In a steady loop the same names come again with every call.
_activation, _input_grad = lru_cache(4096)(Activation), lru_cache(4096)(InputGrad)
_output, _output_grad = lru_cache(4096)(Output), lru_cache(4096)(OutputGrad)


@define(eq=False)
class Executor:
    """One rank's part of one call.

    Args:
        rank: this rank.
        graph: the stage graph.
        stages: this rank's stages by number.
        buffers: of those stages that have any; what a forward does to them is undone unless it is yielded.
        microbatches: the caller's inputs.
        mailbox: where messages come and go.
        channels: all channels of the pipeline.
        differentiates: whether backwards will follow.
        reads: how often each value is read here.
        hands_out: whether every microbatch is yielded here; until then its forwards may have to be run again.
        split_report: by stage, what became of its split backwards; written here.
        call: number of the call.
        seed: of the microbatches' own random numbers; None to draw from the default generators as they come.
        turns: who may draw, if other ranks draw from the same generators.
        recording: notes when each action begins and ends, if anybody wants to know.
        last_backward: announces the last backward of each stage, if anybody wants to know.
        doing: tells other threads what is being performed.

    Attributes:
        retained: microbatches whose graphs outlive their backward.
        yielded: microbatches whose output was handed out.
        on_yield: called with a microbatch and its output when the program hands it to the caller.
    """

    rank: int
    graph: StageGraph
    stages: Mapping[int, StageFunction]
    buffers: Mapping[int, Buffers]
    microbatches: Microbatches
    mailbox: Mailbox
    channels: tuple[Channel, ...]
    differentiates: bool
    reads: Reads
    hands_out: bool
    split_report: dict[int, str]
    seed: int | None
    turns: Turns | None
    call: int
    recording: Recording | None
    last_backward: LastBackward | None
    doing: Doing
    on_yield: Callable[[int, Cargo], None] = field(init=False)
    retained: set[int] = field(init=False, factory=set)
    yielded: set[int] = field(init=False, factory=set)
    _values: dict[Value, tuple[Any, int]] = field(init=False, factory=dict)  # with the number of reads that are left
    _ran: dict[tuple[int, int], Ran] = field(init=False, factory=dict)
    _weight_parts: dict[tuple[int, int], WeightPart] = field(init=False, factory=dict)
    _random_states: dict[tuple[int, int], RandomState] = field(init=False, factory=dict)  # of those not yet yielded
    _sizes: dict[tuple[int, int], tuple[int, int]] = field(init=False, factory=dict)  # leaves, gradient bytes

    def perform(self, program: Program) -> None:
        """Perform actions in order.  If one raises, every rank that waits for one of the rest is told."""
        performed = 0
        try:
            if failure := self.mailbox.transport.failure():
                raise failure.as_error()
            perform = self._perform if self.recording is None else self.recording.around(self._perform)
            perform = perform if self.last_backward is None else self.last_backward.around(perform)
            for action in program:
                self.doing.action = action
                perform(action)
                performed += 1
        except BaseException as error:
            self._tell(error, program[performed:])
            raise
        self.doing.action = None

    def _perform(self, action: Action) -> None:
        match action:
            case Forward(stage, microbatch):
                self._forward(stage, microbatch)
            case Backward(stage, microbatch):
                self._backward(stage, microbatch)
            case BackwardInput(stage, microbatch):
                self._backward_input(stage, microbatch)
            case BackwardWeight(stage, microbatch):
                self._backward_weight(stage, microbatch)
            case Publish(microbatch):
                self._keep(_output(microbatch), self._read(_activation(self.graph.last_stage, microbatch)))
            case Yield(microbatch):
                self._yield(microbatch)
            case Send(value, to_rank):
                self._send(value, to_rank)
            case WaitSend(value, to_rank):
                self.mailbox.wait_send(value, to_rank)
            case PostRecv(value, from_rank):
                self.mailbox.post(value, from_rank, self._first_bytes(value, self.rank))
            case WaitRecv(value, _):
                self._receive(value)
            case _:
                assert_never(action)

    def give(self, microbatch: int, grads: Grads) -> None:
        """Keep the caller's gradient of an output, if a stage of this rank needs it."""
        if self.rank == self.graph.rank_of[self.graph.last_stage]:
            self._keep(_output_grad(microbatch), grads)

    def count(self, microbatch: int) -> None:
        """The caller has its output: what its forwards did to buffers stays."""
        for buffers in self.buffers.values():
            buffers.count(self.call, microbatch)

    def discard(self, microbatches: Iterable[int]) -> None:
        """Free what is kept of microbatches that were dropped."""
        dropped = set(microbatches)
        for value in [value for value in self._values if value.microbatch in dropped]:
            del self._values[value]
        for kept in (self._ran, self._weight_parts):
            for key in [key for key in kept if key[1] in dropped]:
                del kept[key]

    def forget_ahead(self) -> None:
        """Free what is kept of microbatches that have not been yielded, to run them again."""
        known = {value.microbatch for value in self._values} | {microbatch for _, microbatch in self._ran}
        self.discard(known - self.yielded)
        self._put_back_buffers()

    def clear(self) -> None:
        """Free everything."""
        self._values.clear()
        self._ran.clear()
        self._weight_parts.clear()
        self._sizes.clear()
        self._random_states.clear()
        self.microbatches.clear()
        self._put_back_buffers()

    @property
    def held(self) -> int:
        """Number of values and of stages' graphs that are kept at the moment."""
        return len(self._values) + len(self._ran) + len(self._weight_parts)

    def _forward(self, stage: int, microbatch: int) -> None:
        given = self.microbatches[microbatch]
        received = [self._received(_activation(before, microbatch)) for before in self.graph.before(stage)]
        inputs = given.inputs if stage == 0 else ()
        with self._randomness(stage, microbatch, received) as state_after, self._following(stage, microbatch):
            cargo, ran = run_forward(self.stages[stage], received, inputs, given.shared, keep=self.differentiates)
            cargo = self._safe(cargo, stage)
            if states := state_after():
                cargo = evolve(cargo, randomness=states)
        if ran is not None:
            self._ran[stage, microbatch] = ran
        self._keep(_activation(stage, microbatch), cargo)
        if not self.hands_out:
            self.microbatches.release(microbatch)

    def _safe(self, cargo: Cargo, stage: int) -> Cargo:
        """An output that its stage's next microbatch may overwrite; what is sent is copied in time anyway."""
        return cargo.copied() if outlives_its_sends(stage, self.graph) else cargo

    def _received(self, value: Value) -> Cargo:
        """What a stage may use up: if others read it too, a copy."""
        cargo: Cargo = self._read(value)
        return cargo.copied() if value in self._values else cargo

    def _yield(self, microbatch: int) -> None:
        self.yielded.add(microbatch)
        if self.hands_out:
            self.microbatches.release(microbatch)
            for stage in self.stages:
                self._random_states.pop((stage, microbatch), None)
        self.on_yield(microbatch, self._read(_output(microbatch)))

    def _randomness(
        self, stage: int, microbatch: int, received: list[Cargo]
    ) -> AbstractContextManager[Callable[[], tuple[torch.Tensor, ...]]]:
        """Where a forward's random numbers come from, and the state that travels on with its output."""
        if self.seed is not None:
            before = received[0].randomness if received else state_of(self.seed, microbatch)
            return carried(before)
        if self.turns is not None:
            return self._in_turn(self.turns, stage, microbatch)
        state = self._earlier_state(stage, microbatch)
        return _AS_THEY_COME if state is None else _same_again(state)

    @contextmanager
    def _in_turn(self, turns: Turns, stage: int, microbatch: int) -> Iterator[Callable[[], tuple[torch.Tensor, ...]]]:
        with turns.of_forward(stage):
            state = self._earlier_state(stage, microbatch)
            with _AS_THEY_COME if state is None else _same_again(state) as state_after:
                yield state_after

    def _earlier_state(self, stage: int, microbatch: int) -> RandomState | None:
        """The first forward draws as it comes; if it is run again, it draws the same numbers."""
        if not self.hands_out:
            return None
        if state := self._random_states.get((stage, microbatch)):
            return state
        if self.doing.wanted != (self.call, microbatch):  # else it is yielded before anything can be invalidated
            self._random_states[stage, microbatch] = RandomState.now()
        return None

    def _following(self, stage: int, microbatch: int) -> AbstractContextManager[object]:
        """Around a forward that may be dropped before it is yielded."""
        if self.hands_out and (buffers := self.buffers.get(stage)) is not None:
            return buffers.followed(self.call, microbatch)
        return _NOTHING

    def _put_back_buffers(self) -> None:
        for buffers in self.buffers.values():
            buffers.put_back(self.call)

    def _backward(self, stage: int, microbatch: int) -> None:
        grads, (ran, retain) = self._output_grads(stage, microbatch), self._take_ran(stage, microbatch)
        with self._recomputing(stage):
            per_argument = ran.backward(grads, retain_graph=retain)
        self._keep_input_grads(stage, microbatch, per_argument)

    def _backward_input(self, stage: int, microbatch: int) -> None:
        grads, (ran, retain) = self._output_grads(stage, microbatch), self._take_ran(stage, microbatch)
        with self._recomputing(stage):
            per_argument, part = ran.backward_input(grads, retain_graph=retain)
        self._weight_parts[stage, microbatch] = part
        self.split_report[stage] = part.split.summary
        self._keep_input_grads(stage, microbatch, per_argument)

    def _backward_weight(self, stage: int, microbatch: int) -> None:
        part = self._weight_parts.pop((stage, microbatch))
        with self._recomputing(stage):
            part.run(retain_graph=microbatch in self.retained)

    def _recomputing(self, stage: int) -> AbstractContextManager[object]:
        """A backward may run forwards again, which draw numbers."""
        if self.seed is not None:
            return alone()
        return _NOTHING if self.turns is None else self.turns.of_backward(stage)

    def _take_ran(self, stage: int, microbatch: int) -> tuple[Ran, bool]:
        """What the forward left, and whether its graph must outlive the backward."""
        retain = microbatch in self.retained
        return (self._ran[stage, microbatch] if retain else self._ran.pop((stage, microbatch))), retain

    def _keep_input_grads(self, stage: int, microbatch: int, per_argument: tuple[Grads, ...]) -> None:
        before = self.graph.before(stage)
        self._keep(_input_grad(stage, microbatch), dict(zip(before, per_argument, strict=True)))

    def _output_grads(self, stage: int, microbatch: int) -> Grads:
        """The gradients of what a stage returned, added up from its highest consumer down."""
        if stage == self.graph.last_stage:
            own: Grads = self._read(_output_grad(microbatch))
            return own
        *others, last = self.graph.after(stage)
        grads: Grads = self._read(_input_grad(last, microbatch))[stage]
        for consumer in reversed(others):
            more = self._read(_input_grad(consumer, microbatch))[stage]
            grads = tuple(added(left, right) for left, right in zip(grads, more, strict=True))
        return grads

    def _keep(self, value: Value, content: Any) -> None:
        if count := self.reads.of(value):
            self._values[value] = (content, count)

    def _read(self, value: Value) -> Any:
        content, count = self._values.pop(value)
        if count > 1:
            self._values[value] = (content, count - 1)
        return content

    def _send(self, value: Value, to_rank: int) -> None:
        content, room = self._read(value), self._first_bytes(value, to_rank)
        if isinstance(value, InputGrad):
            before = suppliers_of(value, to_rank, self.graph)
            content = tuple([grad for supplier in before for grad in content[supplier]])
        self.mailbox.send(value, to_rank, content, room=room)
        self._note_size(value, content)

    def _receive(self, value: Value) -> None:
        message = self.mailbox.take(value)
        if not isinstance(value, InputGrad):
            cargo = message.cargo()
            self._note_size(value, cargo)
            self._keep(value, cargo)
            return
        suppliers = suppliers_of(value, self.rank, self.graph)
        if len(suppliers) == 1:
            self._keep(value, {suppliers[0]: message.grads()})
            return
        grads = iter(message.grads())
        sizes = [self._sizes[before, value.microbatch][0] for before in suppliers]
        self._keep(value, {before: tuple(islice(grads, size)) for before, size in zip(suppliers, sizes, strict=True)})

    def _note_size(self, value: Value, content: Any) -> None:
        """Both ends of an activation learn how large the gradient that comes back will be."""
        if isinstance(value, Activation):
            self._sizes[value.stage, value.microbatch] = (len(content.leaves), content.grad_bytes)

    def _first_bytes(self, value: Value, receiver: int) -> int:
        """What both ends know of a message: the gradients of a value are as large as the value."""
        if not isinstance(value, InputGrad):
            return wire.FIRST_BYTES
        suppliers = suppliers_of(value, receiver, self.graph)
        return wire.FIRST_BYTES + sum([self._sizes[before, value.microbatch][1] for before in suppliers])

    def _tell(self, error: BaseException, rest: Program) -> None:
        """Tell every rank of an exception, those first that wait for a message from here."""
        failing = describe(rest[0]) if rest else "the caller's code"
        if isinstance(error, DeadlineError):
            report(error, self.mailbox.transport)
        if not isinstance(error, PeerFailedError):
            error.add_note(f"while rank {self.rank} performed {failing}")
        failure = failure_of(self.rank, failing, error)
        self.mailbox.transport.fail(failure)
        owed = [(action.value, action.to_rank) for action in rest if isinstance(action, Send)]
        self.mailbox.notify(failure, owed, self.channels)


_AS_THEY_COME: AbstractContextManager[Callable[[], tuple[torch.Tensor, ...]]] = nullcontext(tuple)

_NOTHING: AbstractContextManager[object] = nullcontext()


@contextmanager
def _same_again(state: RandomState) -> Iterator[Callable[[], tuple[torch.Tensor, ...]]]:
    with state.replayed():
        yield tuple
