"""A forward over packed requests: planned as one group per slot, run group by group."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from megatron.core import parallel_state, tensor_parallel

from . import context
from .compat import preprocess
from .head import IGNORED, ForwardItem, project
from .lora import SlotRef, use_lora_slot
from .memory import output_bytes
from .packing import PrefixTreePack, hidden_from, pad, prefix_tree_pack
from .requests import ForwardInput, ForwardOutput, TrainerRankMemoryError
from .runtime import Runtime, language_model, tensor_group
from .slots import Slots


@attrs.frozen(eq=False)
class ForwardGroup:
    """The requests of one slot, packed into one row; ``request_indices`` are their places in the plan."""

    slot_ref: SlotRef
    request_indices: tuple[int, ...]
    items: tuple[ForwardItem, ...]
    packed: PrefixTreePack


@attrs.frozen(eq=False)
class FlatForwardPlan:
    """All groups of one forward; tokens and bytes."""

    request_count: int
    groups: tuple[ForwardGroup, ...]
    packed_tokens: int
    logical_tokens: int
    output_bytes: int


@attrs.frozen(eq=False)
class PreparedForward:
    """This rank's share of a packed row, on the device.

    Attributes:
        tokens, position_ids: ``[1, own]`` int64.
        attention_state: ``[1, 1, own, packed]`` bool, True where attention is hidden.
        packed_seq_params: None; the mask says everything.
        positions_by_item: ``[own tokens]`` int64 per item, into the share.
        source_positions_by_item: ``[own tokens]`` int64 per item, into the item.
    """

    tokens: torch.Tensor
    position_ids: torch.Tensor
    attention_state: torch.Tensor
    packed_seq_params: None
    positions_by_item: tuple[torch.Tensor, ...]
    source_positions_by_item: tuple[torch.Tensor, ...]


class Forward(Slots):
    """The part of a trainer that plans and runs; see reference.py for the order of its calls."""

    def __init__(self, runtime: Runtime, *, head_chunk_tokens: int, shared_prefix_max_depth: int) -> None:
        if head_chunk_tokens < 1:
            raise ValueError(f"head_chunk_tokens must be >= 1, not {head_chunk_tokens}")
        if shared_prefix_max_depth < 0:
            raise ValueError(f"shared_prefix_max_depth must be >= 0, not {shared_prefix_max_depth}")
        super().__init__(runtime)
        self.head_chunk_tokens = head_chunk_tokens
        self.shared_prefix_max_depth = shared_prefix_max_depth

    def _forward_item(self, request: ForwardInput) -> ForwardItem:
        vocabulary = self._vocabulary
        if request.top_k is not None and request.top_k > vocabulary:
            raise ValueError(f"top_k={request.top_k} exceeds vocabulary size {vocabulary}")
        input_ids = request.input_tokens.reshape(-1).to(torch.long)
        _check_tokens("input_tokens", input_ids, vocabulary)
        if request.target_tokens is None:
            return ForwardItem(request, input_ids, None)
        labels = _labels(request.input_tokens, request.target_tokens)
        _check_tokens("target_tokens", labels.masked_fill(labels == IGNORED, 0), vocabulary)
        return ForwardItem(request, input_ids, labels)

    def _group_active_request_indices(self, requests: Sequence[ForwardInput]) -> dict[SlotRef, list[int]]:
        groups: dict[SlotRef, list[int]] = {}
        for index, request in enumerate(requests):
            if not request.wants_nothing:
                groups.setdefault(self._resolve_slot_ref(request), []).append(index)
        return groups

    def _plan_flat_forward(self, requests: Sequence[ForwardInput]) -> FlatForwardPlan:
        groups = tuple(
            self._plan_group(ref, indices, requests)
            for ref, indices in self._group_active_request_indices(requests).items()
        )
        return FlatForwardPlan(
            request_count=len(requests),
            groups=groups,
            packed_tokens=sum(group.packed.tokens.numel() for group in groups),
            logical_tokens=sum(request.input_tokens.numel() for request in requests),
            output_bytes=output_bytes(self.runtime.provider, self._vocabulary, requests),
        )

    def _plan_group(self, ref: SlotRef, indices: Sequence[int], requests: Sequence[ForwardInput]) -> ForwardGroup:
        items = tuple(self._forward_item(requests[index]) for index in indices)
        packed = prefix_tree_pack((item.input_ids for item in items), max_depth=self.shared_prefix_max_depth)
        return ForwardGroup(ref, tuple(indices), items, packed)

    def _run_flat_plan_with_memory_tracking(self, plan: FlatForwardPlan, *, context: str) -> list[ForwardOutput]:
        try:
            return self._execute_flat_plan(plan)
        except torch.cuda.OutOfMemoryError as error:
            raise TrainerRankMemoryError(f"{context}: out of memory although the estimate fitted") from error

    def _execute_flat_plan(self, plan: FlatForwardPlan) -> list[ForwardOutput]:
        outputs = [ForwardOutput() for _ in range(plan.request_count)]
        for group in plan.groups:
            with use_lora_slot(group.slot_ref):
                prepared = self._prepare_packed_forward(group.packed)
                found = self._forward_packed(group.items, prepared)
            found = self._track_slot_graph_outputs(group.slot_ref, found)
            for index, output in zip(group.request_indices, found, strict=True):
                outputs[index] = output
        return outputs

    def _prepare_packed_forward(self, packed: PrefixTreePack) -> PreparedForward:
        """This rank's share of a packed row: all of it, unless the context is shared out."""
        multiple = parallel_state.get_context_parallel_world_size()
        if self.runtime.provider.sequence_parallel:
            multiple *= parallel_state.get_tensor_model_parallel_world_size()
        packed = pad(packed, multiple=multiple)
        rows = context.own_rows(packed.tokens.numel())
        places = [context.own_places(place) for place in packed.positions_by_sequence]
        return PreparedForward(
            tokens=packed.tokens[:, rows].to(self.device),
            position_ids=packed.position_ids[:, rows].to(self.device),
            attention_state=hidden_from(packed)[:, :, rows].to(self.device),
            packed_seq_params=None,
            positions_by_item=tuple(place for place, _ in places),
            source_positions_by_item=tuple(source for _, source in places),
        )

    def _forward_packed(self, items: Sequence[ForwardItem], prepared: PreparedForward) -> list[ForwardOutput]:
        hidden = self._gather_sequence_parallel_hidden(self._decoder_hidden(prepared))
        return self._project_head(items, prepared, hidden)

    def _decoder_hidden(self, prepared: PreparedForward) -> torch.Tensor:
        """The decoder's output ``[tokens, 1, hidden]``, over this rank's sequence shard if it has one."""
        model = language_model(self.runtime.model[0])
        decoder_input, rotary = preprocess(model, prepared.tokens, prepared.position_ids)
        hidden: torch.Tensor = model.decoder(
            hidden_states=decoder_input, attention_mask=prepared.attention_state, rotary_pos_emb=rotary
        )
        return hidden

    def _gather_sequence_parallel_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.runtime.provider.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=tensor_group()
            )
        return hidden.squeeze(1)

    def _project_head(
        self, items: Sequence[ForwardItem], prepared: PreparedForward, hidden_by_row: torch.Tensor
    ) -> list[ForwardOutput]:
        model = language_model(self.runtime.model[0])
        shares = zip(items, prepared.positions_by_item, prepared.source_positions_by_item, strict=True)
        return [
            project(
                model, _of_item(item, source), hidden_by_row[place.to(self.device)], rows_at_once=self.head_chunk_tokens
            )
            for item, place, source in shares
        ]

    def _track_slot_graph_outputs(self, ref: SlotRef | None, outputs: Sequence[ForwardOutput]) -> list[ForwardOutput]:
        return self._live_graphs.track(ref, list(outputs))

    @property
    def _vocabulary(self) -> int:
        return int(language_model(self.runtime.model[0]).vocab_size)


def _of_item(item: ForwardItem, source: torch.Tensor) -> ForwardItem:
    """Some of an item's tokens, by their places in it; input_ids play no part any more."""
    return item if item.labels is None else attrs.evolve(item, labels=item.labels[source])


def _labels(input_tokens: torch.Tensor, target_tokens: torch.Tensor) -> torch.Tensor:
    shape, rank = tuple(input_tokens.shape), input_tokens.ndim
    if tuple(target_tokens.shape[:rank]) != shape:
        raise ValueError(
            "target_tokens must have the shape of input_tokens, or that shape with further dimensions behind: "
            f"input_tokens {shape}, target_tokens {tuple(target_tokens.shape)}"
        )
    return target_tokens.to(torch.long).reshape(input_tokens.numel(), *target_tokens.shape[rank:])


def _check_tokens(what: str, tokens: torch.Tensor, vocabulary: int) -> None:
    if tokens.numel() == 0:
        raise ValueError(f"{what} must not be empty")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary:
        raise ValueError(f"{what} must be in [0, {vocabulary}), found {low} to {high}")
