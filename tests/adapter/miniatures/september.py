"""A trainer in the shape that ART's had in September 2026, when issue #916 asked for stages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from art_adapter.lora import SlotRef, use_lora_slot

from . import july
from .july import (
    AdamParams,
    MicroBatch,
    TopK,
    TrainerRankMemoryError,
    TrainerRankSlotStateError,
    Unset,
)

__all__ = ["AdamParams", "MicroBatch", "TopK", "TrainerRankMemoryError", "TrainerRankSlotStateError", "Unset"]


class TrainerRankRuntimeSupportError(RuntimeError):
    """The current topology is not supported."""


@dataclass(frozen=True)
class ForwardOutput(july.ForwardOutput):
    checkpoint: str | None = None
    no_grad: bool = False


@dataclass(slots=True)
class ForwardInput(july.ForwardInput):
    no_grad: bool | None = None


@dataclass(frozen=True)
class _ForwardGroupPlan:
    slot_ref: SlotRef
    grad_enabled: bool
    request_indices: tuple[int, ...]
    items: tuple[Any, ...]
    packed: Any


class TrainerRank(july.TrainerRank):
    """Groups by slot and by grad mode; every output says which slot it came from."""

    def __init__(self, runtime: Any) -> None:
        if runtime.provider.pipeline_model_parallel_size > 1 or len(runtime.model) > 1:
            raise TrainerRankRuntimeSupportError("TrainerRank requires PP=1 with exactly one local model chunk")
        super().__init__(runtime)

    def forward_micro_batches(self, inputs: Any, *, checkpoint: Any = Unset, no_grad: bool | None = None) -> Any:
        return super().forward_micro_batches([_with_defaults(item, checkpoint, no_grad) for item in inputs])

    def dp_rank_forward(self, inputs: Any, *, checkpoint: Any = Unset, no_grad: bool | None = None) -> Any:
        return super().dp_rank_forward(_with_defaults(inputs, checkpoint, no_grad))

    def _group_key(self, request: Any) -> Any:
        wanted = not request.no_grad if request.no_grad is not None else True
        return self._resolve_slot_ref(request), wanted and torch.is_grad_enabled()

    def _plan_group(self, key: Any, indices: Sequence[int], requests: Sequence[Any]) -> Any:
        ref, grad_enabled = key
        plan = super()._plan_group(ref, indices, requests)
        return _ForwardGroupPlan(ref, grad_enabled, plan.request_indices, plan.items, plan.packed)

    def _execute_flat_plan(self, plan: Any) -> list[Any]:
        outputs = [ForwardOutput(None, None, None, None) for _ in range(plan.request_count)]
        for group in plan.groups:
            found = self._execute_group(group)
            for index, output in zip(group.request_indices, found, strict=True):
                outputs[index] = replace(output, checkpoint=group.slot_ref.name, no_grad=not group.grad_enabled)
        return outputs

    def _execute_group(self, group: Any) -> list[Any]:
        with use_lora_slot(group.slot_ref), nullcontext() if group.grad_enabled else torch.no_grad():
            prepared = self._prepare_packed_forward(group.packed)
            found = self._forward_packed(group.items, prepared)
        return self._track_slot_graph_outputs(group.slot_ref, found)

    def _project_head(self, items: Sequence[Any], prepared: Any, hidden_by_row: torch.Tensor) -> list[Any]:
        found = super()._project_head(items, prepared, hidden_by_row)
        return [ForwardOutput(each.target_logprobs, each.top_k, each.logits, each.hidden_states) for each in found]

    def _track_slot_graph_outputs(self, ref: Any, outputs: Sequence[Any]) -> list[Any]:
        tracked = super()._track_slot_graph_outputs(ref, outputs)
        return [ForwardOutput(each.target_logprobs, each.top_k, each.logits, each.hidden_states) for each in tracked]


def _with_defaults(inputs: Any, checkpoint: Any, no_grad: bool | None) -> Any:
    """Nested inputs; what a request leaves open, the call decides."""
    if not isinstance(inputs, ForwardInput):
        if isinstance(inputs, (dict, str)):
            return inputs
        return [_with_defaults(item, checkpoint, no_grad) for item in inputs]
    return replace(
        inputs,
        checkpoint=checkpoint if inputs.checkpoint is Unset else inputs.checkpoint,
        no_grad=no_grad if inputs.no_grad is None else inputs.no_grad,
    )
