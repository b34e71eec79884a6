"""Gradients over stages: the norm's squares are added as one stage adds them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")

from art_adapter.gradients import added_up


def test_squares_are_added_in_the_order_of_the_model_whatever_stage_they_lie_on() -> None:
    """In float32 a 1 that comes after 2 ** 24 is lost, and two that come before it are not."""
    stages = [[(2, 2.0**24), (0, 1.0)], [(1, 1.0)]]
    assert float(added_up(stages, torch.float32)) == 2.0**24 + 2
    assert float(added_up([[(0, 2.0**24), (1, 1.0)], [(2, 1.0)]], torch.float32)) == 2.0**24
