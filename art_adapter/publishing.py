"""Publishing a slot whose layers lie on several stages: rank 0 writes what all ranks hold.

ART's publisher describes the weights of all ranks from those of rank 0. That model is one stage only, so it refuses;
here each rank says itself what it has, and ART's own code merges and writes it.
"""

from __future__ import annotations

from typing import Any

from .agreement import gather, together
from .compat import entries_to_publish, publishing_with, write_published


class PipelinedPublishing:
    """What a pipelined trainer overrides if its own class can publish."""

    stages: Any

    def save_checkpoint_slot_lora(self, name: str, output_dir: str) -> None:
        """As the trainer's own: one file for the whole model, written by rank 0; collective over the world."""
        save = super().save_checkpoint_slot_lora  # type: ignore[misc]
        if self.stages is None:
            save(name, output_dir)
            return
        with publishing_with(_save):
            save(name, output_dir)


def _save(
    *, model: Any, adapter_model: Any, handler: Any, adapter_config: Any, output_dir: str, slot_ref: Any, **_: Any
) -> None:
    own = entries_to_publish(model, adapter_model, handler, slot_ref)
    regular, experts = (_everywhere(tensors, metadata) for tensors, metadata in own)
    together("publishing", lambda: write_published(regular, experts, handler, adapter_config, output_dir))


def _everywhere(tensors: dict[str, Any], metadata: list[Any]) -> tuple[list[Any], dict[tuple[int, str], Any]]:
    """What all ranks have, and their tensors on the CPU by owner and key."""
    told = gather((metadata, {key: tensor.detach().cpu() for key, tensor in tensors.items()}))
    found = {(each.owner_rank, each.key): held[each.key] for described, held in told for each in described}
    return [each for described, _ in told for each in described], found
