"""The gate: where the caller's backward enters the pipeline.

An output that is handed to the caller hangs on a gate.  The gate's backward only records the gradients.  When the
caller's backward call ends, all that it recorded is served at once: autograd decides in which order gates are
visited, the engine in which order backwards run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from attrs import define, field, frozen

from pipeline_engine.errors import UsageError
from pipeline_engine.run.cargo import Cargo, Grads
from pipeline_engine.run.stage import ANCHOR


class Giving(Protocol):
    """What a gate needs of the call whose output it holds."""

    number: int
    gates: dict[int, weakref.ref[torch.Tensor]]

    def check_may_give(self, microbatch: int) -> None:
        """Raise if the gradient of ``microbatch`` comes too late."""

    def give(self, grads: dict[int, Grads], *, retain: bool) -> None:
        """Take the gradients of the outputs of these microbatches and run the backwards they allow."""


@frozen(eq=False)
class _Record:
    call: Giving
    microbatch: int
    grads: Grads
    retain: bool


@define(eq=False)
class Gatekeeper:
    """Collects what one backward call of the caller gives, and passes it on when that call ends."""

    _records: list[_Record] = field(init=False, factory=list)
    _task: int = field(init=False, default=-1)

    def gated(self, cargo: Cargo, call: Giving, microbatch: int) -> Any:
        """The tree of an output, its tensors with a history that ends at a gate."""
        if not any(cargo.needs_grad):
            return cargo.tree()
        wanted = [leaf for leaf, needs_grad in zip(cargo.leaves, cargo.needs_grad, strict=True) if needs_grad]
        marker = torch.empty(0)
        call.gates[microbatch] = weakref.ref(marker)
        gives = cargo.needs_grad  # and no more of the cargo: the gate must not hold its own outputs

        def record(*grads: torch.Tensor | None) -> None:
            given = iter(grads)
            every = tuple([next(given) if needs_grad else None for needs_grad in gives])
            retain = torch._C._autograd._get_current_graph_task_keep_graph()
            self._record(_Record(call, microbatch, every, retain))

        gated = iter(_Gate.apply(ANCHOR, record, wanted, marker))  # type: ignore[no-untyped-call]
        leaves = [
            next(gated) if needs_grad else leaf for leaf, needs_grad in zip(cargo.leaves, cargo.needs_grad, strict=True)
        ]
        return cargo.tree(leaves)

    def forget(self) -> None:
        """Drop records of a backward call that raised elsewhere in the caller's graph, so that it never ended."""
        self._records.clear()
        self._task = -1

    def _record(self, record: _Record) -> None:
        record.call.check_may_give(record.microbatch)
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self.forget()
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._serve)
        self._records.append(record)

    def _serve(self) -> None:
        records = self._records[:]
        self.forget()
        calls = {record.call.number: record.call for record in records}
        for number in sorted(calls):
            given = {record.microbatch: record.grads for record in records if record.call.number == number}
            calls[number].give(given, retain=records[0].retain)


class _Gate(torch.autograd.Function):
    """Hands tensors on.  They come in a list: to autograd they are fresh, and the caller may change them in place."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        record: Callable[..., None],
        tensors: list[torch.Tensor],
        marker: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.record = record
        ctx.set_materialize_grads(False)
        # So that a second backward without retain_graph is refused as usual, and the marker lives until the first.
        ctx.save_for_backward(marker)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None, None]:
        _ = ctx.saved_tensors
        if torch.is_grad_enabled():
            raise UsageError("create_graph=True: a pipeline keeps no graph of its backward; call backward without it.")
        ctx.record(*grads)
        return None, None, None, None
