"""What a trainer stands on: this rank's model chunks and their Megatron configuration."""

from __future__ import annotations

from typing import Any

import attrs
from megatron.core import parallel_state


@attrs.define(eq=False)
class Runtime:
    """One rank's part of a model; the fields of ART's TrainingRuntime that a trainer reads.

    Attributes:
        model: this rank's chunks, in the order of the pipeline; one unless stages are virtual.
        provider: the ``TransformerConfig`` of the whole model, the same on every rank.
        optimizer: an optimizer of the base weights, or None while they are frozen.
        rank, world_size: of ``torch.distributed``.
    """

    model: list[Any]
    provider: Any
    optimizer: Any = None
    rank: int = 0
    world_size: int = 1


def language_model(chunk: Any) -> Any:
    """The GPTModel inside DDP, Float16Module and other wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def tensor_group() -> Any:
    """The tensor-parallel ranks of this rank; Megatron's collectives want it said."""
    return parallel_state.get_tensor_model_parallel_group()
