"""From hidden states to what a request asks for, a few rows of vocabulary at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from megatron.core import tensor_parallel
from torch.nn import functional

from .requests import ForwardInput, ForwardOutput, TopK
from .runtime import tensor_group

IGNORED = -100
"""The target that means "no target here"."""


@attrs.frozen(eq=False)
class ForwardItem:
    """A checked request: input_ids ``[tokens]``, labels ``[tokens, ...]`` or None, both int64."""

    request: ForwardInput
    input_ids: torch.Tensor
    labels: torch.Tensor | None


def project(model: Any, item: ForwardItem, hidden: torch.Tensor, *, rows_at_once: int) -> ForwardOutput:
    """Everything that one item asks for.

    Args:
        model: a GPTModel that holds the output layer.
        item: the request and its labels.
        hidden: ``[tokens, hidden]``, the item's own rows in source order.
        rows_at_once: how many rows of logits may exist at a time, unless logits are asked for.
    """
    request = item.request
    states = hidden if request.hidden_states else None
    if item.labels is None and request.top_k is None and not request.logits:
        return ForwardOutput(hidden_states=states)
    rows = torch.split(hidden, rows_at_once)
    labels = [None] * len(rows) if item.labels is None else torch.split(item.labels.to(hidden.device), rows_at_once)
    scored = [_score(vocabulary_logits(model, h), want, request) for h, want in zip(rows, labels, strict=True)]
    return _concatenate(scored, states)


def vocabulary_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits ``[rows, vocabulary]`` in the model's dtype, whole on every tensor-parallel rank."""
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    local = functional.linear(tensor_parallel.copy_to_tensor_model_parallel_region(hidden, tensor_group()), weight)
    whole: torch.Tensor = tensor_parallel.gather_from_tensor_model_parallel_region(local, tensor_group())
    return whole


def _score(logits: torch.Tensor, labels: torch.Tensor | None, request: ForwardInput) -> ForwardOutput:
    kept = logits if request.logits else None
    if labels is None and request.top_k is None:
        return ForwardOutput(logits=kept)
    logprobs = logits.float().log_softmax(dim=-1)
    top_k = None if request.top_k is None else TopK(*torch.topk(logprobs, request.top_k, dim=-1))
    return ForwardOutput(None if labels is None else _target_logprobs(logprobs, labels), top_k, kept)


def _target_logprobs(logprobs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    flat = labels.reshape(len(labels), -1)
    picked = logprobs.gather(1, flat.clamp(min=0))
    return picked.masked_fill(flat == IGNORED, 0.0).reshape(labels.shape)


def _concatenate(parts: Sequence[ForwardOutput], hidden_states: torch.Tensor | None) -> ForwardOutput:
    def along_tokens(values: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        present = [value for value in values if value is not None]
        return torch.cat(present) if present else None

    best = [part.top_k for part in parts if part.top_k is not None]
    return ForwardOutput(
        target_logprobs=along_tokens([part.target_logprobs for part in parts]),
        top_k=TopK(torch.cat([b.logprobs for b in best]), torch.cat([b.tokens for b in best])) if best else None,
        logits=along_tokens([part.logits for part in parts]),
        hidden_states=hidden_states,
    )
