"""The composed part: groups of requests go through the stages of a pipeline, outputs come back on every rank.

Nothing here knows a trainer's class.  A trainer hands over two functions, what a middle stage and what the last stage
does with a group, and gets outputs of deferred groups back, one by one (``stream``) or all at once (``forward``).
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

import pipeline_engine as pe

Outputs = list[tuple[torch.Tensor | None, ...]]
"""For each item of a group its output tensors, in a fixed order; None for what was not asked for."""


@attrs.define(eq=False)
class Group:
    """A group of requests whose forward is still to run.

    Attributes:
        items, prepared: what the trainer's own forward takes.
        tokens: length of the packed row, its relative cost.
        placeholders: what the trainer holds instead of the outputs.
        context: the ContextVars under which the group was planned; they select its LoRA slot.
        slot: what the trainer calls the slot, once it has said so.
    """

    items: Sequence[Any]
    prepared: Any
    tokens: int
    placeholders: Sequence[Any]
    context: contextvars.Context = attrs.field(factory=contextvars.copy_context)
    slot: Any = None


class StageExecutor:
    """This rank's stage of a model and the pipeline that it is part of.

    Args:
        model: the chunk of this stage; its boundary input is set with ``set_input_tensor``.
        process_group: the ranks of the pipeline, in stage order.
        hidden: ``hidden(group)`` returns the decoder's output ``[tokens, 1, hidden]`` of this stage.
        outputs: ``outputs(group)`` returns the tensors of every item; called on the last stage.
        schedule: a name of ``pipeline_engine.SCHEDULES``.
        deadline: seconds that any single wait for another stage may take.
    """

    def __init__(
        self,
        model: Any,
        process_group: Any,
        *,
        hidden: Callable[[Group], torch.Tensor],
        outputs: Callable[[Group], Outputs],
        schedule: str,
        deadline: float,
    ) -> None:
        transport = pe.TorchTransport(process_group)
        ranks = transport.num_ranks
        self._model = model
        self._run = outputs if transport.rank == ranks - 1 else hidden
        self.pipeline = pe.Pipeline(
            {transport.rank: self._stage},
            graph=pe.StageGraph.chain(stages=ranks, ranks=ranks),
            schedule=schedule,
            transport=transport,
            deadline=deadline,
        )

    def stream(self, groups: Sequence[Group]) -> Iterator[Outputs]:
        """Outputs of the groups in order; the caller's backward in between runs this stage's backwards."""
        for item in self.pipeline.stream([_microbatch(group) for group in groups]):
            yield item.outputs

    def forward(self, groups: Sequence[Group]) -> list[Outputs]:
        """Outputs of all groups at once."""
        return self.pipeline.forward([_microbatch(group) for group in groups])

    def _stage(self, *received: torch.Tensor, group: Group) -> Any:
        if received:
            self._model.set_input_tensor(received[0])
        try:
            return group.context.copy().run(self._run, group)
        finally:
            self._model.set_input_tensor(None)


def _microbatch(group: Group) -> pe.Microbatch:
    return pe.Microbatch(shared={"group": group}, weight=float(max(1, group.tokens)))
