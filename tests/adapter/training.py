"""What tests of the reference trainer share: one with two slots, a loss, an optimizer."""

from __future__ import annotations

import torch

from art_adapter import AdamParams, ForwardOutput, ReferenceTrainerRank
from art_adapter.tiny_gpt import adapter

ADAM = AdamParams(learning_rate=1e-2)


def with_slots(trainer: ReferenceTrainerRank) -> ReferenceTrainerRank:
    for name, seed in (("A", 1), ("B", 2)):
        trainer.load_checkpoint_slot(name, adapter(trainer.runtime.provider, seed=seed), alpha=8.0)
    trainer.set_checkpoint("A")
    return trainer


def loss_of(outputs: list[ForwardOutput]) -> torch.Tensor:
    return torch.stack([-output.target_logprobs.mean() for output in outputs]).sum()


def gradients(trainer: ReferenceTrainerRank, slot: str = "A") -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in trainer._checkpoint_slot_params_by_name[slot]]
