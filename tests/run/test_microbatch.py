"""A microbatch refuses what would silently mean something else."""

from __future__ import annotations

import pytest
import torch

import pipeline_engine as pe


def test_a_bare_tensor_is_not_taken_for_a_tuple_of_its_rows() -> None:
    with pytest.raises(pe.UsageError, match=r"Microbatch.inputs is a tensor; .* inputs=\(tensor,\)"):
        pe.Microbatch(torch.ones(1, 8))  # type: ignore[arg-type]


def test_shared_arguments_have_names() -> None:
    with pytest.raises(pe.UsageError, match=r"Microbatch.shared is a Tensor; it holds keyword arguments by name"):
        pe.Microbatch((), torch.ones(2))  # type: ignore[arg-type]


def test_a_weight_is_more_than_nothing() -> None:
    with pytest.raises(ValueError, match="'weight' must be > 0"):
        pe.Microbatch(weight=0)
