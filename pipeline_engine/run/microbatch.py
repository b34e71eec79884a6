"""Microbatch: one unit of work as the caller hands it in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen, validators


@frozen
class Microbatch:
    """Inputs of one microbatch.

    Args:
        inputs: positional arguments of the first stage; read on the first stage's rank only.
        shared: keyword arguments of every stage, on every rank.
        weight: relative cost, for example the number of tokens.
    """

    inputs: tuple[Any, ...] = field(default=(), converter=tuple)
    shared: Mapping[str, Any] = field(factory=dict)
    weight: float = field(default=1.0, validator=validators.gt(0))
