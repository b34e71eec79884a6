"""The base weights, where a trainer trains them: the parameters of the checkpoint whose name is None.

An output layer that is tied to the embedding is the same weight.  Where the two lie on different stages, each stage
holds a copy; the copies get the sum of their gradients when the pipeline is flushed, and count once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from .runtime import language_model

COPY = "copy_of_the_embedding"
"""The attribute of a tied weight: True where it is the output layer's copy, False where it is the embedding."""


def train(chunks: Iterable[Any]) -> tuple[torch.nn.Parameter, ...]:
    """Let this rank's base weights require gradients; they are returned in the order of the model."""
    weights: list[torch.nn.Parameter] = []
    for chunk in map(language_model, chunks):
        chunk.requires_grad_(True)
        if (tied := _tied(chunk)) is not None:
            setattr(tied, COPY, not chunk.pre_process)
        weights += chunk.parameters()
    return tuple(weights)


def is_tied(parameter: torch.nn.Parameter) -> bool:
    """Whether the parameter is the embedding and the output layer."""
    return hasattr(parameter, COPY)


def is_copy(parameter: torch.nn.Parameter) -> bool:
    """Whether it is the one of the two that stands for the other."""
    return bool(getattr(parameter, COPY, False))


def trained_copies(chunks: Mapping[int, Any]) -> dict[int, torch.nn.Parameter]:
    """By stage, this rank's copies of a tied weight, if it requires gradients; chunks: by stage."""
    found = {stage: _tied(language_model(chunk)) for stage, chunk in chunks.items()}
    return {stage: weight for stage, weight in found.items() if weight is not None and weight.requires_grad}


def named_globally(chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The weights of a chunk by their names in the whole model, where a tied weight has the embedding's."""
    for name, parameter in chunk.named_parameters():
        if chunk.share_embeddings_and_output_weights:
            name = name.replace("output_layer.", "embedding.word_embeddings.")
        if name.startswith("decoder.layers."):
            local, rest = name.removeprefix("decoder.layers.").split(".", 1)
            name = f"decoder.layers.{chunk.decoder.layers[int(local)].layer_number - 1}.{rest}"
        yield name, parameter


def _tied(chunk: Any) -> Any:
    """The weight of a GPTModel's chunk that is tied, or None."""
    if not chunk.share_embeddings_and_output_weights or not (chunk.pre_process or chunk.post_process):
        return None
    return chunk.shared_embedding_or_output_weight()
