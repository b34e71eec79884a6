"""A trainer in ART's newest shape: a group's graph stays inside, and the caller gets copies tied to it by a bridge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from art_adapter.lora import use_lora_slot
from art_adapter.records import tensors_of

from . import september
from .september import (
    AdamParams,
    ForwardInput,
    ForwardOutput,
    MicroBatch,
    TopK,
    TrainerRankMemoryError,
    TrainerRankRuntimeSupportError,
    TrainerRankSlotStateError,
    Unset,
)

__all__ = [
    "AdamParams",
    "ForwardInput",
    "ForwardOutput",
    "MicroBatch",
    "TopK",
    "TrainerRankMemoryError",
    "TrainerRankRuntimeSupportError",
    "TrainerRankSlotStateError",
    "Unset",
]


class GraphCache:
    """Graphs by number; what leaves it is a copy that does not keep the graph alive."""

    def __init__(self) -> None:
        self._physical: dict[int, tuple[torch.Tensor, ...]] = {}
        self._cotangents: dict[int, dict[int, torch.Tensor]] = {}

    def run(self, execute: Callable[[], Sequence[torch.Tensor]]) -> tuple[int, list[torch.Tensor]]:
        """Run a group; its number, and copies of its outputs."""
        physical = tuple(execute())
        number = len(self._physical)
        self._physical[number] = physical
        return number, [value.detach().clone().requires_grad_(value.requires_grad) for value in physical]

    def collect(self, number: int, place: int, cotangent: torch.Tensor) -> None:
        """The gradient of one copy; when the caller's backward ends, the group's own runs once."""
        if not self._cotangents:
            torch.autograd.Variable._execution_engine.queue_callback(self._backward)
        self._cotangents.setdefault(number, {})[place] = cotangent

    def _backward(self) -> None:
        collected, self._cotangents = self._cotangents, {}
        for number, cotangents in collected.items():
            outputs = [self._physical[number][place] for place in cotangents]
            torch.autograd.backward(outputs, list(cotangents.values()), retain_graph=True)


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copy: torch.Tensor, give: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.give = give
        return copy.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None]:
        ctx.give(grads[0])
        return None, None


class TrainerRank(september.TrainerRank):
    """Groups run inside the cache."""

    def __init__(self, runtime: Any) -> None:
        super().__init__(runtime)
        self._graph_cache = GraphCache()

    def _execute_group(self, group: Any) -> list[Any]:
        spec: list[list[bool]] = []

        def execute() -> list[torch.Tensor]:
            with use_lora_slot(group.slot_ref), nullcontext() if group.grad_enabled else torch.no_grad():
                prepared = self._prepare_packed_forward(group.packed)
                found = [tensors_of(output) for output in self._forward_packed(group.items, prepared)]
            spec[:] = [[value is not None for value in tensors] for tensors in found]
            return [value for tensors in found for value in tensors if value is not None]

        number, copies = self._graph_cache.run(execute)
        flat = iter([self._bridged(number, place, copy) for place, copy in enumerate(copies)])
        outputs = []
        for present in spec:
            logprobs, best, tokens, logits, hidden = (next(flat) if is_there else None for is_there in present)
            top_k = None if best is None else TopK(best, tokens)
            outputs.append(ForwardOutput(logprobs, top_k, logits, hidden))
        return self._track_slot_graph_outputs(group.slot_ref, outputs)

    def _bridged(self, number: int, place: int, copy: torch.Tensor) -> Any:
        if not copy.requires_grad:
            return copy
        return _Bridge.apply(copy, lambda gradient: self._graph_cache.collect(number, place, gradient))
