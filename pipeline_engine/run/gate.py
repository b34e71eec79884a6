"""The gate: where the caller's backward enters the pipeline.

An output that is handed to the caller hangs on a gate.  The gate's backward only records the gradients.  When the
caller's backward call ends, all that it recorded is served at once: autograd decides in which order gates are
visited, the engine in which order backwards run.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import torch
from attrs import define, field, frozen

from pipeline_engine.errors import UsageError
from pipeline_engine.run.cargo import Cargo, Grads
from pipeline_engine.run.edges import Passage
from pipeline_engine.run.stage import ANCHOR


class Giving(Protocol):
    """What a gate needs of the call whose output it holds."""

    number: int
    gates: dict[int, weakref.ref[Gate]]

    def check_may_give(self, microbatch: int) -> None:
        """Raise if the gradient of ``microbatch`` comes too late."""

    def give(self, grads: dict[int, Grads], *, retain: bool) -> None:
        """Take the gradients of the outputs of these microbatches and run the backwards they allow."""


@frozen(eq=False)
class Gate:
    """One output's; it lives as long as autograd can reach it, and holds nothing of the output.

    Attributes:
        needs_grad: for each leaf of the output whether its gradient is wanted.
    """

    keeper: Gatekeeper
    call: Giving
    microbatch: int
    needs_grad: tuple[bool, ...]

    def all_leaves(self, grads: Iterable[torch.Tensor | None]) -> Grads:
        """The gradients of all leaves from those of the leaves that want one."""
        given = iter(grads)
        return tuple([next(given) if needs_grad else None for needs_grad in self.needs_grad])


@define(eq=False)
class _Taken:
    """What one backward call of the caller has given so far.

    Attributes:
        retain: whether that call retains graphs.
        given: by the number of a pipeline's call, that and the gradients by microbatch.
    """

    retain: bool
    given: dict[int, tuple[Giving, dict[int, Grads]]] = field(init=False, factory=dict)

    def serve(self) -> None:
        """The backward call has ended."""
        for number in sorted(self.given):
            call, grads = self.given[number]
            call.give(grads, retain=self.retain)


@define(eq=False)
class Gatekeeper:
    """Collects what each backward call of the caller gives, and passes it on when that call ends.

    One may run inside another: that of a reentrant checkpoint whose function uses outputs.
    """

    _taken: dict[int, _Taken] = field(init=False, factory=dict)  # by autograd's number of the backward call

    def gated(self, cargo: Cargo, call: Giving, microbatch: int) -> Any:
        """The tree of an output, its tensors with a history that ends at a gate."""
        wanted = [leaf for leaf, needs_grad in zip(cargo.leaves, cargo.needs_grad, strict=True) if needs_grad]
        if not wanted:
            return cargo.tree()
        gate = Gate(self, call, microbatch, cargo.needs_grad)
        call.gates[microbatch] = weakref.ref(gate)
        gated = iter(_Gated.apply(ANCHOR, gate, wanted))
        leaves = [
            next(gated) if needs_grad else leaf for leaf, needs_grad in zip(cargo.leaves, cargo.needs_grad, strict=True)
        ]
        return cargo.tree(leaves)

    def forget(self) -> None:
        """Drop what backward calls gave that raised elsewhere in the caller's graph, so that they never ended."""
        self._taken.clear()

    def take(self, gate: Gate, grads: Iterable[torch.Tensor | None]) -> None:
        """A backward call of the caller has come to a gate."""
        call = gate.call
        call.check_may_give(gate.microbatch)
        task = torch._C._current_graph_task_id()
        taken = self._taken.get(task)
        if taken is None:
            taken = self._taken[task] = _Taken(torch._C._autograd._get_current_graph_task_keep_graph())
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._serve, task))
        taken.given.setdefault(call.number, (call, {}))[1][gate.microbatch] = gate.all_leaves(grads)

    def _serve(self, task: int) -> None:
        if (taken := self._taken.pop(task, None)) is None:
            raise UsageError("the pipeline was called inside of a backward call that had given it gradients.")
        taken.serve()


class _Gated(Passage):
    """Hands tensors on.  They come in a list: to autograd they are fresh, and the caller may change them in place."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, gate: Gate, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        ctx.gate = gate
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(anchor)  # so that a second backward without retain_graph is refused as usual
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None]:
        _ = ctx.saved_tensors
        if torch.is_grad_enabled():
            raise UsageError("create_graph=True: a pipeline keeps no graph of its backward; call backward without it.")
        ctx.gate.keeper.take(ctx.gate, grads)
        return None, None, None
