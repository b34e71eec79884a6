"""The composed part: groups of requests go through the stages of a pipeline, outputs come back on every rank.

Nothing here knows a trainer's class.  A trainer hands over two functions, what a middle stage and what the last stage
does with a group, and gets outputs of deferred groups back, one by one (``stream``) or all at once (``forward``).
"""

from __future__ import annotations

import contextvars
import zlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import attrs
import torch

import pipeline_engine as pe

from .agreement import check_same
from .compat import boundary_input
from .records import Tensors

Outputs = list[Tensors]
"""For each item of a group its output tensors, in a fixed order; None for what was not asked for."""


@attrs.define(eq=False)
class Group:
    """A group of requests whose forward is still to run.

    It is made where the forward would have run: the ContextVars, which select the LoRA slot, and the grad mode are
    those of that place.

    Attributes:
        items, prepared: what the trainer's own forward takes.
        numbers: of the placeholders that the trainer holds instead of the outputs.
        slot: what the trainer calls the slot, once it has said so.
    """

    items: Sequence[Any]
    prepared: Any
    numbers: Sequence[int] = ()
    slot: Any = None
    context: contextvars.Context = attrs.field(init=False, factory=contextvars.copy_context)
    differentiates: bool = attrs.field(init=False, factory=torch.is_grad_enabled)

    @property
    def tokens(self) -> int:
        """Length of the packed row, its relative cost."""
        return int(self.prepared.tokens.numel())

    def run(self, forward: Callable[[Group], Any]) -> Any:
        """Run a forward where the group was made."""
        with torch.set_grad_enabled(self.differentiates and torch.is_grad_enabled()):
            return self.context.copy().run(forward, self)

    def __str__(self) -> str:
        """What all stages must mean alike: slot, grad mode, and of each item its tokens and what it asks for."""
        grad = "" if self.differentiates else " without gradients"
        return f"slot {self.slot}{grad}, {self.tokens} packed tokens: {', '.join(map(_asked, self.items))}"


def _asked(item: Any) -> str:
    request, tokens = item.request, item.input_ids.tolist()
    targets = None if request.target_tokens is None else tuple(request.target_tokens.shape)
    checksum = zlib.crc32(repr(tokens).encode())
    return (
        f"{len(tokens)} tokens ({checksum:08x}) targets={targets} top_k={request.top_k} "
        f"logits={request.logits} hidden_states={request.hidden_states}"
    )


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
        schedule: str = "1f1b",
        deadline: float = 600.0,
    ) -> None:
        transport = pe.TorchTransport(process_group)
        ranks = transport.num_ranks
        self._model = model
        self._process_group = process_group
        self._forward = outputs if transport.rank == ranks - 1 else hidden
        self._device = next(model.parameters()).device
        self.pipeline = pe.Pipeline(
            {transport.rank: self._stage},
            graph=pe.StageGraph.chain(stages=ranks, ranks=ranks),
            schedule=schedule,
            transport=transport,
            deadline=deadline,
        )

    def check_planned_alike(self, groups: Sequence[Group]) -> None:
        """Compare what the stages have planned, before anything of it runs; collective over the pipeline.

        Args:
            groups: what this stage has planned.

        Raises:
            UsageError: on every rank, if two stages differ; the message shows both sides.
        """
        said = "\n  ".join(map(str, groups)) or "nothing"
        check_same("stages have planned differently", said, device=self._device, group=self._process_group)

    def stream(self, groups: Sequence[Group]) -> Generator[Outputs, None, None]:
        """Outputs of the groups in order; the caller's backward in between runs this stage's backwards.

        Args:
            groups: the same on all stages.

        Yields:
            for each group its items' tensors, on every stage.
        """
        for item in self.pipeline.stream([_microbatch(group) for group in groups]):
            yield item.outputs

    def forward(self, groups: Sequence[Group]) -> list[Outputs]:
        """Outputs of all ``groups`` at once, on every stage; the caller's backward drives the rest."""
        return self.pipeline.forward([_microbatch(group) for group in groups])

    def _stage(self, *received: torch.Tensor, group: Group) -> Any:
        with boundary_input(self._model, received):
            return group.run(self._forward)


def _microbatch(group: Group) -> pe.Microbatch:
    return pe.Microbatch(shared={"group": group}, weight=float(max(1, group.tokens)))
