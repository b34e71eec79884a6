"""Publishing a slot whose layers lie on several stages: rank 0 writes what all ranks hold.

ART's publisher describes the weights of all ranks from those of rank 0. That model is one stage only, so it refuses;
here each rank says itself what it has, and ART's own code merges and writes it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from .agreement import gather, together

PUBLISHER = "art.megatron.weights.lora_publish"


class PipelinedPublishing:
    """What a pipelined trainer overrides if its own class can publish."""

    stages: Any

    def save_checkpoint_slot_lora(self, name: str, output_dir: str) -> None:
        """As the trainer's own: one file for the whole model, written by rank 0; collective over the world."""
        if self.stages is not None:
            self.stages.pipeline.flush()
        with _told_by_every_rank() if self.stages is not None else contextlib.nullcontext():
            super().save_checkpoint_slot_lora(name, output_dir)  # type: ignore[misc]


@contextlib.contextmanager
def _told_by_every_rank() -> Iterator[None]:
    publisher = importlib.import_module(PUBLISHER)
    own = publisher.save_vllm_lora_from_model
    publisher.save_vllm_lora_from_model = _save
    try:
        yield
    finally:
        publisher.save_vllm_lora_from_model = own


def _save(
    *,
    model: Any,
    adapter_model: Any,
    handler: Any,
    adapter_config: Any,
    output_dir: str,
    rank: int,
    slot_ref: Any,
    **_: Any,
) -> None:
    publisher = importlib.import_module(PUBLISHER)
    packed = tuple(handler.expert_packed_lora_groups())
    options = {"owner_rank": rank, "packed_expert_groups": packed, "slot_ref": slot_ref}
    regular = _everywhere(publisher.collect_local_lora_entries(model, adapter_model, **options))
    experts = _everywhere(publisher.collect_local_packed_expert_entries(model, adapter_model, **options))

    def write() -> None:
        if rank == 0:
            publisher._save_rank0_vllm_lora(
                metadata=regular[0],
                tensors_by_owner_key=regular[1],
                packed_expert_metadata=experts[0],
                packed_expert_tensors_by_owner_key=experts[1],
                handler=handler,
                adapter_config=adapter_config,
                output_dir=output_dir,
            )

    together("publishing", write)


def _everywhere(local: tuple[dict[str, Any], list[Any]]) -> tuple[list[Any], dict[tuple[int, str], Any]]:
    """What all ranks have, and their tensors on the CPU by owner and key."""
    tensors, metadata = local
    told = gather((metadata, {key: tensor.detach().cpu() for key, tensor in tensors.items()}))
    found = {(each.owner_rank, each.key): held[each.key] for described, held in told for each in described}
    return [each for described, _ in told for each in described], found
