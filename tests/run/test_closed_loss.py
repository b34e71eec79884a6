"""The closed loop's loss is a scalar, and whoever returns something else is told so on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pipeline_engine as pe
from tests.run.playing import ROWS, Rank, batch, loss_of, on_ranks


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (lambda outputs: None, "NoneType"),
        (lambda outputs: outputs.sum().item(), "float"),
        (lambda outputs: outputs, r"tensor of shape \[4, 8\]"),
    ],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_loss_that_is_no_scalar_is_refused_on_every_rank_and_the_next_call_is_right(
    returned: Any, what: str, mode: Any
) -> None:
    def loss(outputs: Any, number: int) -> Any:
        return returned(outputs) if number == 2 else loss_of(outputs, number)

    said = f"loss_fn returned a {what} for microbatch 2; step differentiates a tensor with one element: return it."

    def on_rank(rank: Rank) -> None:
        kind = pe.UsageError if rank.number == 1 else pe.PeerFailedError
        with mode(), pytest.raises(kind, match=said):
            rank.pipeline.step(batch(ROWS), loss)
        rank.zero_grad()
        rank.pipeline.step(batch(ROWS), lambda outputs, number: loss_of(outputs, number).reshape(1, 1))
        rank.check_gradients(range(len(ROWS)), ROWS)

    on_ranks(on_rank)


@pytest.mark.parametrize("cut", [lambda outputs: outputs.detach().sum(), lambda outputs: torch.zeros(())])
def test_a_loss_that_is_cut_off_from_the_outputs_is_refused_on_every_rank_unless_no_gradient_is_wanted(
    cut: Any,
) -> None:
    def loss(outputs: Any, number: int) -> Any:
        return cut(outputs) if number == 2 else loss_of(outputs, number)

    said = (
        r"loss_fn returned a loss that requires no gradient for microbatch 2, whose outputs require one; step "
        r"differentiates it: compute it from the outputs without detach\(\)"
    )

    def on_rank(rank: Rank) -> None:
        kind = pe.UsageError if rank.number == 1 else pe.PeerFailedError
        with pytest.raises(kind, match=said):
            rank.pipeline.step(batch(ROWS), loss)
        with torch.no_grad():
            assert len(rank.pipeline.step(batch(ROWS), loss)) == len(ROWS)
        rank.zero_grad()
        rank.pipeline.step(batch(ROWS), loss_of)
        rank.check_gradients(range(len(ROWS)), ROWS)

    on_ranks(on_rank)


def test_of_frozen_stages_any_loss_is_taken() -> None:
    def on_rank(rank: Rank) -> list[float]:
        rank.stage.requires_grad_(False)
        return [loss.item() for loss in rank.pipeline.step(batch(ROWS), lambda outputs, number: torch.ones(()))]

    assert on_ranks(on_rank) == [[1.0] * len(ROWS)] * 2
