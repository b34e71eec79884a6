"""The records of either host, ART's dataclasses or the reference's, taken apart and put together again."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs
import torch

T = TypeVar("T")

Tensors = tuple[torch.Tensor | None, ...]
"""target_logprobs, top_k.logprobs, top_k.tokens, logits, hidden_states."""


def replace(record: T, **changes: Any) -> T:
    """A copy of a frozen record with other values in some fields."""
    if dataclasses.is_dataclass(record):
        copied: T = dataclasses.replace(record, **changes)  # type: ignore[type-var]
        return copied
    evolved: T = attrs.evolve(record, **changes)  # type: ignore[misc]
    return evolved


def shifted(window: Any, start: int) -> Any:
    """A window of the items from ``start`` on, told as one of all items."""
    stats = replace(
        window.stats,
        global_start=window.stats.global_start + start,
        global_stop=window.stats.global_stop + start,
    )
    return replace(window, indices=tuple(index + start for index in window.indices), stats=stats)


def tensors_of(output: Any) -> Tensors:
    """The tensors of a ForwardOutput in a fixed order."""
    best = output.top_k
    pair = (None, None) if best is None else (best.logprobs, best.tokens)
    return (output.target_logprobs, *pair, output.logits, output.hidden_states)


@attrs.frozen
class Records:
    """The classes by which a host hands outputs to its caller."""

    forward_output: type
    top_k: type

    @classmethod
    def of(cls, host: type) -> Records:
        """Those of the module in which the trainer's class was written, or of this package."""
        namespace: Mapping[str, Any] = vars(sys.modules[host.__module__])
        if "ForwardOutput" not in namespace:
            from . import requests

            namespace = vars(requests)
        return cls(namespace["ForwardOutput"], namespace["TopK"])

    def placeholder(self) -> Any:
        """A ForwardOutput that stands for one that is still to come; its hidden_states are its identity."""
        return self.forward_output(target_logprobs=None, top_k=None, logits=None, hidden_states=torch.empty(0))

    def output(self, tensors: Tensors) -> Any:
        """The ForwardOutput of these tensors."""
        logprobs, best, tokens, logits, hidden = tensors
        top_k = None if best is None else self.top_k(logprobs=best, tokens=tokens)
        return self.forward_output(target_logprobs=logprobs, top_k=top_k, logits=logits, hidden_states=hidden)
