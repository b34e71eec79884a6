"""What a slot is published by, in the shape of ART's publisher, and July's trainer with the method that calls it.

Each rank describes and brings what it holds; rank 0 puts the shards together and writes one file for the whole model.
Like ART's, it refuses several stages: it describes the weights of all ranks from the modules of rank 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file

from art_adapter.lora import SHARDED, Site, SlotRef, install

from . import july
from .july import AdamParams, ForwardInput, TrainerRankMemoryError, TrainerRankSlotStateError, Unset

__all__ = ["AdamParams", "ForwardInput", "TrainerRankMemoryError", "TrainerRankSlotStateError", "Unset"]

PLACE_OF_ARTS = "art.megatron.weights.lora_publish"
"""The module that this one stands for."""


@dataclass(frozen=True)
class ShardMeta:
    """One rank's part of a weight: which of how many shards, along which dimension, of how many components each."""

    key: str
    owner_rank: int
    shard: int
    shards: int
    dim: int
    components: int


class Handler:
    """What a model's family knows: no packed experts, and names as they are served."""

    def expert_packed_lora_groups(self) -> tuple[Any, ...]:
        return ()

    def to_vllm_lora_tensors(
        self, tensors: Mapping[str, torch.Tensor], *, adapter_config: Mapping[str, Any]
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        served = {f"base_model.model.{key}.weight": tensor.contiguous() for key, tensor in tensors.items()}
        return served, {**adapter_config, "peft_type": "LORA"}


class TrainerRank(july.TrainerRank):
    """July's, which can publish."""

    def save_checkpoint_slot_lora(self, name: str, output_dir: str) -> None:
        if name not in self._checkpoint_slot_params_by_name:
            raise ValueError(f"Unknown checkpoint slot: {name!r}")
        save_vllm_lora_from_model(
            model=self.runtime.model,
            adapter_model={},
            handler=Handler(),
            adapter_config={"r": 4, "lora_alpha": 8.0},
            output_dir=output_dir,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            slot_ref=SlotRef("checkpoint", name),
        )


def save_vllm_lora_from_model(
    *, model: Any, adapter_model: Any, handler: Any, adapter_config: Any, output_dir: str, slot_ref: Any, **_: Any
) -> None:
    if parallel_state.get_pipeline_model_parallel_world_size() > 1 or len(model) > 1:
        raise RuntimeError("LoRA publish planner requires pipeline_model_parallel_size=1")
    tensors, metadata = collect_local_lora_entries(
        model, adapter_model, owner_rank=dist.get_rank(), packed_expert_groups=(), slot_ref=slot_ref
    )
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (tensors, metadata))
    if dist.get_rank() == 0:
        _save_rank0_vllm_lora(
            metadata=[each for _, described in told for each in described],
            tensors_by_owner_key={(rank, key): held[key] for rank, (held, _) in enumerate(told) for key in held},
            packed_expert_metadata=[],
            packed_expert_tensors_by_owner_key={},
            handler=handler,
            adapter_config=adapter_config,
            output_dir=output_dir,
        )


def collect_local_lora_entries(
    model: Any, adapter_model: Any, *, owner_rank: int, packed_expert_groups: Any, slot_ref: SlotRef
) -> tuple[dict[str, torch.Tensor], list[ShardMeta]]:
    """What this rank brings: of replicas the first one only."""
    tensors: dict[str, torch.Tensor] = {}
    metadata: list[ShardMeta] = []
    for site in install(model):
        for half, parameter in _halves(site, slot_ref):
            sharded = bool(getattr(parameter, SHARDED))
            shard = parallel_state.get_tensor_model_parallel_rank()
            if parallel_state.get_data_parallel_rank(with_context_parallel=True) or (shard and not sharded):
                continue
            key = f"{site.name}.{half}"
            shards = parallel_state.get_tensor_model_parallel_world_size() if sharded else 1
            dim, components = (0, site.parts) if half == "lora_B" else (1, 1)
            tensors[key] = parameter.detach()
            metadata.append(ShardMeta(key, owner_rank, shard, shards, dim, components))
    return tensors, metadata


def collect_local_packed_expert_entries(*_: Any, **__: Any) -> tuple[dict[str, torch.Tensor], list[Any]]:
    return {}, []


def _save_rank0_vllm_lora(
    *,
    metadata: Sequence[ShardMeta],
    tensors_by_owner_key: Mapping[tuple[int, str], torch.Tensor],
    packed_expert_metadata: Sequence[Any],
    packed_expert_tensors_by_owner_key: Mapping[Any, torch.Tensor],
    handler: Any,
    adapter_config: Any,
    output_dir: str,
) -> None:
    parts: dict[str, list[ShardMeta]] = {}
    for each in metadata:
        parts.setdefault(each.key, []).append(each)
    merged = {key: _merged(key, shards, tensors_by_owner_key) for key, shards in parts.items()}
    tensors, config = handler.to_vllm_lora_tensors(merged, adapter_config=adapter_config)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config, sort_keys=True))


def _merged(key: str, shards: Sequence[ShardMeta], tensors: Mapping[tuple[int, str], torch.Tensor]) -> torch.Tensor:
    ordered = sorted(shards, key=lambda each: each.shard)
    if [each.shard for each in ordered] != list(range(ordered[0].shards)):
        raise RuntimeError(f"{key}: shards {[each.shard for each in ordered]} of {ordered[0].shards}")
    pieces = [tensors[each.owner_rank, key].chunk(each.components, each.dim) for each in ordered]
    whole = [piece[number] for number in range(ordered[0].components) for piece in pieces]
    return torch.cat(whole, ordered[0].dim)


def _halves(site: Site, ref: SlotRef) -> Iterator[tuple[str, torch.nn.Parameter]]:
    if (adapter := site.adapters.get(ref)) is not None:
        yield from (("lora_A", adapter.A), ("lora_B", adapter.B))
