"""The composed part: groups of requests go through the stages of a pipeline, outputs come back on every rank.

Nothing here knows a trainer's class.  A trainer hands over two functions, what a middle stage and what the last stage
does with a group, and gets outputs of deferred groups back: all at once (``forward``), or in waves of which more come
while it runs (``pipeline.waves``).
"""

from __future__ import annotations

import contextvars
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import torch

import pipeline_engine as pe

from .agreement import check_same
from .base_model import trained_copies
from .chunks import graph_of
from .compat import boundary_input
from .pace import Agreed, Pace
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
        tokens: length of the packed row, its relative cost; the same on all ranks that run it, also on
            context-parallel ones with shares of unequal length. By default that of ``prepared``, for a row that is not
            shared out.
        numbers: of the placeholders that the trainer holds instead of the outputs.
        slot: what the trainer calls the slot, once it has said so.
        around: runs a forward of this group and may look at what it takes, or at how it fails.
    """

    items: Sequence[Any]
    prepared: Any
    tokens: int = attrs.field(
        default=attrs.Factory(lambda self: int(self.prepared.tokens.numel()), takes_self=True), kw_only=True
    )
    numbers: Sequence[int] = ()
    slot: Any = None
    around: Callable[[Callable[[], Any]], Any] = attrs.field(default=lambda run: run())
    context: contextvars.Context = attrs.field(init=False, factory=contextvars.copy_context)
    differentiates: bool = attrs.field(init=False, factory=torch.is_grad_enabled)

    def run(self, forward: Callable[[Group], Any]) -> Any:
        """Run a forward where the group was made."""
        with torch.set_grad_enabled(self.differentiates and torch.is_grad_enabled()):
            return self.around(lambda: self.context.copy().run(forward, self))

    @property
    def microbatch(self) -> pe.Microbatch:
        """The group as a pipeline takes it."""
        return pe.Microbatch(shared={"group": self}, weight=float(max(1, self.tokens)))

    def __str__(self) -> str:
        """What all stages must mean alike: slot, grad mode, and of each item its tokens and what it asks for."""
        grad = "" if self.differentiates else " without gradients"
        return f"slot {self.slot}{grad}: {', '.join(map(_asked, self.items))}"


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
        agreeing: the ranks that must decide alike; by default those of the pipeline. Tensor- and context-parallel ranks
            meet inside their stages, so they must run the same actions in the same order.
        peer_error: as of ``pe.Pipeline``.

    Attributes:
        pace: what this rank has measured of its own stages.
        agreed: what all of them know of the stages' speed, or None before anything ran.

    Raises:
        UsageError: the chunks of all ranks together are not the model.
    """

    agreed: Agreed | None = None

    def __init__(
        self,
        chunks: Sequence[Any],
        process_group: Any,
        *,
        hidden: Callable[[Any, Group], torch.Tensor],
        outputs: Callable[[Any, Group], Outputs],
        schedule: str | None = None,
        deadline: float = 600.0,
        agreeing: Any = None,
        peer_error: Callable[[pe.PeerFailedError], Exception] | None = None,
    ) -> None:
        transport = pe.TorchTransport(process_group)
        rank, graph = transport.rank, graph_of(chunks, process_group)
        self._agreeing = process_group if agreeing is None else agreeing
        self.pace = Pace(rank)
        self._device = next(chunks[0].parameters()).device
        self.graph = graph
        self.schedule = schedule or schedule_for(graph)
        log_choice(self.schedule, graph, rank=rank, was_named=schedule is not None)
        chunk_of = dict(zip(graph.stages_of(rank), chunks, strict=True))
        tied = trained_copies(chunk_of)
        self.pipeline = pe.Pipeline(
            {
                stage: partial(_run, chunk, outputs if stage == graph.last_stage else hidden)
                for stage, chunk in chunk_of.items()
            },
            graph=graph,
            schedule=self.schedule,
            transport=transport,
            deadline=deadline,
            keep_open=True,  # as without a pipeline, outputs of one slot may wait while another slot steps
            ties=[pe.tie("embedding and output layer", tied)] if tied else [],
            tracer=self.pace,
            peer_error=peer_error,
        )

    def check_planned_alike(self, groups: Sequence[Group]) -> None:
        """Compare what the ranks have planned, before anything of it runs; collective over those that decide alike.

        On the way they tell each other how fast they are, for the next plan.

        Args:
            groups: what this rank has planned.

        Raises:
            UsageError: on every rank, if two ranks differ; the message shows both sides.
        """
        said = "\n  ".join(map(str, groups)) or "nothing"
        words = check_same(
            "ranks have planned differently",
            said,
            numbers=self.pace.words(),
            device=self._device,
            group=self._agreeing,
        )
        self.agreed = Agreed.of(words)

    def forward(self, groups: Sequence[Group]) -> list[Outputs]:
        """Outputs of all ``groups`` at once, on every stage; the caller's backward drives the rest."""
        return self.pipeline.forward([group.microbatch for group in groups])


def _run(chunk: Any, forward: Callable[[Any, Group], Any], *received: torch.Tensor, group: Group) -> Any:
    with boundary_input(language_model(chunk), received):
        return group.run(partial(forward, chunk))
