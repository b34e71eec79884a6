"""Every microbatch counts exactly once: each is changed in turn, and every gradient changes by just that."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipeline_engine as pe
from tests.run.playing import ROWS, WIDTH, Rank, on_ranks

CHANGE = 16.0  # all numbers here are small integers, so sums of them are exact in any order


class Scaling(nn.Module):
    """Multiplies by a weight of ones: its gradient is the sum of all inputs, whatever stage it is."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def train(rank: Rank, entry: str, data: list[pe.Microbatch]) -> list[torch.Tensor]:
    """One step; the gradients of this rank's stages."""
    rank.zero_grad()
    if entry == "step":
        rank.pipeline.step(data, lambda outputs, index: outputs.sum())
    elif entry == "forward":
        torch.stack([outputs.sum() for outputs in rank.pipeline.forward(data)]).sum().backward()
    else:
        for item in rank.pipeline.stream(data):
            item.outputs.sum().backward()
    rank.pipeline.flush()
    return [stage.weight.grad.clone() for stage in rank.stages.values()]


def batch(changed: int | None = None) -> list[pe.Microbatch]:
    values = [1.0 if number != changed else 1.0 + CHANGE for number in range(len(ROWS))]
    return [pe.Microbatch((torch.full((rows, WIDTH), value),)) for rows, value in zip(ROWS, values, strict=True)]


@pytest.mark.parametrize("entry", ["stream", "forward", "step"])
@pytest.mark.parametrize("schedule", pe.SCHEDULES)
def test_a_change_of_one_microbatch_is_seen_once_in_the_gradient_of_every_stage(schedule: str, entry: str) -> None:
    def on_rank(rank: Rank) -> None:
        before = train(rank, entry, batch())
        assert all(torch.equal(grad, torch.full((WIDTH,), float(sum(ROWS)))) for grad in before)
        for number, rows in enumerate(ROWS):
            after = train(rank, entry, batch(changed=number))
            for grad, old in zip(after, before, strict=True):
                assert torch.equal(grad - old, torch.full((WIDTH,), CHANGE * rows)), f"microbatch {number}"

    on_ranks(on_rank, 3, schedule, Scaling)
