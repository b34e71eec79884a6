"""A trainer in the shape that ART's had in July 2026."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from art_adapter import lora
from art_adapter.lora import SlotRef, use_lora_slot
from art_adapter.memory import forward_bytes, output_bytes
from art_adapter.optimizer import SlotOptimizer
from art_adapter.reference import ReferenceTrainerRank
from art_adapter.requests import AdamParams, TrainerRankMemoryError, TrainerRankSlotStateError, Unset

__all__ = ["AdamParams", "TrainerRankMemoryError", "TrainerRankSlotStateError", "Unset"]


@dataclass(frozen=True)
class TopK:
    logprobs: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class ForwardOutput:
    target_logprobs: torch.Tensor | None
    top_k: TopK | None
    logits: torch.Tensor | None
    hidden_states: torch.Tensor | None


@dataclass(slots=True)
class ForwardInput:
    input_tokens: torch.Tensor
    target_tokens: torch.Tensor | None = None
    top_k: int | None = None
    logits: bool = False
    hidden_states: bool = False
    checkpoint: Any = Unset
    lora: Any = Unset


@dataclass(frozen=True)
class MicroBatchStats:
    global_start: int
    global_stop: int
    global_count: int
    local_count: int
    packed_tokens: int
    estimated_required_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class MicroBatch:
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    indices: Sequence[int]
    stats: MicroBatchStats

    def select(self, xs: Sequence[Any]) -> Sequence[Any]:
        return [xs[index] for index in self.indices]


@dataclass(frozen=True)
class _ForwardGroupPlan:
    slot_ref: SlotRef
    request_indices: tuple[int, ...]
    items: tuple[Any, ...]
    packed: Any


@dataclass(frozen=True)
class _FlatForwardPlan:
    request_count: int
    groups: tuple[_ForwardGroupPlan, ...]
    packed_tokens: int
    output_bytes: int


class _SlotGraphSentinel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, marker: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(marker)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None]:
        return grads[0], None


class TrainerRank(ReferenceTrainerRank):
    """Slots, LoRA and the decoder are the reference's; what stands between them is laid out as ART's was."""

    def __init__(self, runtime: Any, *, head_chunk_tokens: int = 512, shared_prefix_max_depth: int = 1) -> None:
        super().__init__(runtime, head_chunk_tokens=head_chunk_tokens, shared_prefix_max_depth=shared_prefix_max_depth)
        self._pending_slot_graphs: dict[SlotRef, list[weakref.ref[torch.Tensor]]] = {}
        self._memory_profiles: dict[int, int] = {}
        self._decoder_calls = 0
        self.zero_grad()

    def forward_micro_batches(self, inputs: Iterable[Any]) -> Iterator[Any]:
        items = [_materialize(item) for item in inputs]
        for request in _flatten(items):
            self._forward_item(request)
        self._validate_replicated_top_level_count(len(items))
        dp_rank, dp_size = self._dp_rank_and_size()
        start = 0
        while start < len(items):
            stop = min(start + dp_size, len(items))  # on a CPU nothing is known of memory: the smallest window
            indices = tuple(range(start + dp_rank, stop, dp_size))
            local = [items[index] for index in indices]
            plan = self._plan_flat_forward(list(_flatten(local)))
            required, available = self._memory_check_required(plan, group=None)
            outputs = iter(self._run_flat_plan_with_memory_tracking(plan, context="forward_micro_batches"))
            stats = MicroBatchStats(start, stop, stop - start, len(local), plan.packed_tokens, required, available)
            yield MicroBatch(local, [_unflatten(item, outputs) for item in local], indices, stats)
            start = stop

    def dp_rank_forward(self, inputs: Any) -> Any:
        materialized = _materialize(inputs)
        plan = self._plan_flat_forward(list(_flatten(materialized)))
        required, available = self._memory_check_required(plan, group=self._forward_memory_group())
        if required > available:
            raise TrainerRankMemoryError("dp_rank_forward: forward is predicted to exceed available memory")
        outputs = self._run_flat_plan_with_memory_tracking(plan, context="dp_rank_forward")
        return _unflatten(materialized, iter(outputs))

    def _group_active_request_indices(self, requests: Sequence[Any]) -> Any:
        groups: dict[Any, list[int]] = {}
        for index, request in enumerate(requests):
            if any((request.target_tokens is not None, request.logits, request.top_k, request.hidden_states)):
                groups.setdefault(self._group_key(request), []).append(index)
        return groups

    def _group_key(self, request: Any) -> Any:
        return self._resolve_slot_ref(request)

    def _plan_flat_forward(self, requests: Sequence[Any]) -> Any:
        groups = tuple(
            self._plan_group(key, indices, requests)
            for key, indices in self._group_active_request_indices(requests).items()
        )
        tokens = sum(group.packed.tokens.numel() for group in groups)
        return _FlatForwardPlan(
            len(requests), groups, tokens, output_bytes(self.runtime.provider, self._vocabulary, requests)
        )

    def _memory_check_required(self, plan: Any, *, group: Any) -> tuple[int, int]:
        lengths = [each.packed.tokens.numel() for each in plan.groups]
        required = forward_bytes(self.runtime.provider, lengths) + plan.output_bytes
        values = torch.tensor([required, -(1 << 60)], dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
        return int(values[0]), -int(values[1])

    def _run_flat_plan_with_memory_tracking(self, plan: Any, *, context: str) -> list[Any]:
        before = self._decoder_calls
        outputs = self._execute_flat_plan(plan)
        self._update_memory_profile(plan, self._decoder_calls - before)
        return outputs

    def _update_memory_profile(self, plan: Any, peak: int) -> None:
        self._memory_profiles[plan.packed_tokens] = peak

    def _execute_flat_plan(self, plan: Any) -> list[Any]:
        outputs = [ForwardOutput(None, None, None, None) for _ in range(plan.request_count)]
        for group in plan.groups:
            with use_lora_slot(group.slot_ref):
                prepared = self._prepare_packed_forward(group.packed)
                found = self._forward_packed(group.items, prepared)
            found = self._track_slot_graph_outputs(group.slot_ref, found)
            for index, output in zip(group.request_indices, found, strict=True):
                outputs[index] = output
        return outputs

    def _decoder_hidden(self, prepared: Any) -> torch.Tensor:
        self._decoder_calls += 1
        return super()._decoder_hidden(prepared)

    def _project_head(self, items: Sequence[Any], prepared: Any, hidden_by_row: torch.Tensor) -> list[Any]:
        return [
            ForwardOutput(
                found.target_logprobs,
                None if found.top_k is None else TopK(found.top_k.logprobs, found.top_k.tokens),
                found.logits,
                found.hidden_states,
            )
            for found in super()._project_head(items, prepared, hidden_by_row)
        ]

    def _track_slot_graph_outputs(self, ref: Any, outputs: Sequence[Any]) -> list[Any]:
        if ref is None or ref.name is None:
            return list(outputs)
        marker = torch.empty(0)

        def track(tensor: torch.Tensor | None) -> Any:
            if tensor is None or not tensor.requires_grad:
                return tensor
            return _SlotGraphSentinel.apply(tensor, marker)

        self._pending_slot_graphs.setdefault(ref, []).append(weakref.ref(marker))
        return [
            ForwardOutput(
                track(output.target_logprobs),
                None if output.top_k is None else TopK(track(output.top_k.logprobs), output.top_k.tokens),
                track(output.logits),
                track(output.hidden_states),
            )
            for output in outputs
        ]

    def _has_live_slot_graph(self, ref: SlotRef) -> bool:
        return any(marker() is not None for marker in self._pending_slot_graphs.get(ref, ()))

    def _guard_slot_can_load(self, ref: SlotRef) -> None:
        if self._has_live_slot_graph(ref):
            raise TrainerRankSlotStateError(f"Cannot load {ref.kind} slot {ref.name!r}: live backward graph")

    def _guard_checkpoint_can_step(self, name: str) -> None:
        if self._has_live_slot_graph(SlotRef("checkpoint", name)):
            raise TrainerRankSlotStateError(f"Cannot optim_step checkpoint slot {name!r}: live backward graph")

    def _validate_dynamic_slot_consistency(self, kind: Any, name: str, loaded_sites: int) -> Any:
        params = lora.parameters(self._sites, SlotRef(kind, name))
        local = (int(loaded_sites), tuple((tuple(param.shape), str(param.dtype)) for param in params))
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, local)
        if any(state != gathered[0] for state in gathered):
            raise RuntimeError(f"Dynamic LoRA slot {kind}:{name} is not loaded consistently across distributed ranks")
        return params

    def _dynamic_optim_step(
        self, checkpoint_names: Sequence[str], *, params: AdamParams, scale_grads: float
    ) -> dict[str, float]:
        selected = []
        for name in checkpoint_names:
            self._guard_checkpoint_can_step(name)
            slot = self._checkpoint_slot_params_by_name[name]
            selected.append((name, slot, self._reduce_dynamic_grads(slot, scale_grads=scale_grads)))
        norm = _distributed_grad_norm(
            [param for _, slot, _ in selected for param in slot], [grad for _, _, grads in selected for grad in grads]
        )
        told = {"learning_rate": params.learning_rate, "grad_norm": norm, "num_zeros_in_grad": 0.0}
        if not math.isfinite(norm):
            self.zero_grad()
            return {**told, "update_successful": 0.0}
        clip = min(1.0, params.grad_clip_norm / (norm + 1e-6)) if params.grad_clip_norm > 0 else 1.0
        for name, slot, grads in selected:
            optimizer = self._dynamic_optimizers.setdefault(name, SlotOptimizer([], params))
            optimizer.join(slot, params)
            optimizer.step([grad * clip for grad in grads])
            for param in slot:
                param.grad = None
        return {**told, "update_successful": 1.0}


def _distributed_grad_norm(params: Sequence[torch.nn.Parameter], grads: Sequence[torch.Tensor]) -> float:
    squared = torch.zeros((), dtype=torch.float32)
    for param, grad in zip(params, grads, strict=True):
        if _include_in_distributed_grad_norm(param):
            squared.add_(grad.square().sum())
    dist.all_reduce(squared)
    return float(squared.sqrt())


def _include_in_distributed_grad_norm(param: torch.nn.Parameter) -> bool:
    return int(parallel_state.get_data_parallel_rank()) == 0


def _materialize(inputs: Any) -> Any:
    return [_materialize(item) for item in _children(inputs)] if not isinstance(inputs, ForwardInput) else inputs


def _flatten(inputs: Any) -> Iterator[Any]:
    if isinstance(inputs, ForwardInput):
        yield inputs
    else:
        for item in _children(inputs):
            yield from _flatten(item)


def _unflatten(template: Any, outputs: Iterator[Any]) -> Any:
    if isinstance(template, ForwardInput):
        return next(outputs)
    return [_unflatten(item, outputs) for item in _children(template)]


def _children(inputs: Any) -> Iterator[Any]:
    if isinstance(inputs, dict):
        raise TypeError("dict was passed directly to TrainerRank")
    if isinstance(inputs, str):
        raise TypeError("forward inputs must be ForwardInput objects or nested iterables of them, not strings")
    return iter(inputs)
