"""A small transformer over bytes, in layers that can be cut anywhere; the same weights however it is cut."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional


@frozen
class Shape:
    """Sizes of the model and of one microbatch, in elements."""

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    vocabulary: int = 1024
    tokens: int = 256


class Embedding(nn.Module):
    """``[1, tokens]`` int64 to ``[1, tokens, hidden]`` float32."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(shape.vocabulary, shape.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        looked_up: Tensor = self.table(tokens)
        return looked_up


class Block(nn.Module):
    """Causal attention and a feed-forward layer, ``[1, tokens, hidden]`` to the same."""

    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        torch.manual_seed(100 + number)
        self.heads = shape.heads
        self.before = nn.LayerNorm(shape.hidden)
        self.queries_keys_values = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.out = nn.Linear(shape.hidden, shape.hidden)
        self.between = nn.LayerNorm(shape.hidden)
        self.wide = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.narrow = nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, tokens, width = hidden.shape
        heads = self.queries_keys_values(self.before(hidden)).view(batch, tokens, 3, self.heads, -1)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        fed: Tensor = hidden + self.narrow(functional.gelu(self.wide(self.between(hidden))))
        return fed


class Head(nn.Module):
    """``[1, tokens, hidden]`` to logits ``[1, tokens, vocabulary]``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.project = nn.Linear(shape.hidden, shape.vocabulary)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.project(hidden)
        return logits


def layers(shape: Shape) -> list[nn.Module]:
    """All layers, in order."""
    return [Embedding(shape), *(Block(shape, number) for number in range(shape.layers)), Head(shape)]


def cut(shape: Shape, num_stages: int) -> list[nn.Sequential]:
    """The stages, blocks spread evenly; the embedding goes with the first and the head with the last."""
    embedding, *blocks, head = layers(shape)
    per_stage = len(blocks) // num_stages
    stages = [blocks[stage * per_stage : (stage + 1) * per_stage] for stage in range(num_stages)]
    return [nn.Sequential(*part) for part in with_ends(stages, embedding, head)]


def with_ends(stages: Sequence[list[nn.Module]], first: nn.Module, last: nn.Module) -> list[list[nn.Module]]:
    parts = [list(stage) for stage in stages]
    parts[0].insert(0, first)
    parts[-1].append(last)
    return parts


def text(shape: Shape, microbatches: int) -> list[Tensor]:
    """Token rows ``[1, tokens]``, drawn once and for all."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, shape.vocabulary, (microbatches, 1, shape.tokens), generator=generator)
    return list(rows)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross entropy of the next token."""
    return functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
