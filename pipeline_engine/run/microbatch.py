"""Microbatch: one unit of work as the caller hands it in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from attrs import field, frozen, validators

from pipeline_engine.errors import UsageError


def _inputs(inputs: Iterable[Any]) -> tuple[Any, ...]:
    if isinstance(inputs, torch.Tensor):  # as an iterable it would be a tuple of its rows
        raise UsageError("Microbatch.inputs is a tensor; it holds positional arguments: inputs=(tensor,).")
    return tuple(inputs)


def _check_shared(_: object, attribute: object, shared: Mapping[str, Any]) -> None:
    if not isinstance(shared, Mapping):
        raise UsageError(f"Microbatch.shared is a {type(shared).__name__}; it holds keyword arguments by name.")


@frozen
class Microbatch:
    """Inputs of one microbatch.

    Args:
        inputs: positional arguments of the first stage; read on the first stage's rank only.
        shared: keyword arguments of every stage, on every rank.
        weight: relative cost, for example the number of tokens; more than 0.

    Raises:
        UsageError: ``inputs`` is a bare tensor, or ``shared`` is no mapping.
        ValueError: the weight is 0 or less.
    """

    inputs: tuple[Any, ...] = field(default=(), converter=_inputs)
    shared: Mapping[str, Any] = field(factory=dict, validator=_check_shared)
    weight: float = field(default=1.0, validator=validators.gt(0))
