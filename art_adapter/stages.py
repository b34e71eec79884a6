"""The composed part: groups of requests go through the stages of a pipeline, outputs come back on every rank.

Nothing here knows a trainer's class.  A trainer hands over two functions, what a middle stage and what the last stage
does with a group, and gets outputs of deferred groups back, one by one (``stream``) or all at once (``forward``).
"""

from __future__ import annotations

import contextvars
import zlib
from collections.abc import Callable, Generator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import attrs
import torch

import pipeline_engine as pe

from .agreement import check_same
from .chunks import graph_of
from .compat import boundary_input
from .records import Tensors
from .runtime import language_model
from .scheduling import log_choice, schedule_for

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
    """This rank's stages of a model and the pipeline that they are part of.

    Args:
        chunks: of the model on this rank, as in ``runtime.model``; the boundary input of each is set with
            ``set_input_tensor``.
        process_group: the ranks of the pipeline, in stage order.
        hidden: ``hidden(chunk, group)`` returns the decoder's output ``[tokens, 1, hidden]`` of a chunk.
        outputs: ``outputs(chunk, group)`` returns the tensors of every item; called on the last stage.
        schedule: a name of ``pipeline_engine.SCHEDULES``; by default what fits the number of chunks.
        deadline: seconds that any single wait for another stage may take.

    Raises:
        UsageError: the chunks of all ranks together are not the model.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        process_group: Any,
        *,
        hidden: Callable[[Any, Group], torch.Tensor],
        outputs: Callable[[Any, Group], Outputs],
        schedule: str | None = None,
        deadline: float = 600.0,
    ) -> None:
        transport = pe.TorchTransport(process_group)
        rank, graph = transport.rank, graph_of(chunks, process_group)
        self._process_group = process_group
        self._device = next(chunks[0].parameters()).device
        self.schedule = schedule or schedule_for(graph)
        log_choice(self.schedule, graph, rank=rank, was_named=schedule is not None)
        self.pipeline = pe.Pipeline(
            {
                stage: partial(_run, chunk, outputs if stage == graph.last_stage else hidden)
                for stage, chunk in zip(graph.stages_of(rank), chunks, strict=True)
            },
            graph=graph,
            schedule=self.schedule,
            transport=transport,
            deadline=deadline,
            keep_open=True,  # as without a pipeline, outputs of one slot may wait while another slot steps
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
        items = self.pipeline.stream([_microbatch(group) for group in groups])
        yield from map(attrgetter("outputs"), items)  # holds none of them: a trainer sees by that what still waits

    def forward(self, groups: Sequence[Group]) -> list[Outputs]:
        """Outputs of all ``groups`` at once, on every stage; the caller's backward drives the rest."""
        return self.pipeline.forward([_microbatch(group) for group in groups])


def _run(chunk: Any, forward: Callable[[Any, Group], Any], *received: torch.Tensor, group: Group) -> Any:
    with boundary_input(language_model(chunk), received):
        return group.run(partial(forward, chunk))


def _microbatch(group: Group) -> pe.Microbatch:
    return pe.Microbatch(shared={"group": group}, weight=float(max(1, group.tokens)))
