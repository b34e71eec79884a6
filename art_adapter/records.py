"""The records of either host, ART's dataclasses or the reference's, taken apart and put together again."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any, TypeVar

import attrs
import torch

from pipeline_engine import PeerFailedError

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


def fields_of(record: Any) -> set[str]:
    """The names of a record's fields."""
    if dataclasses.is_dataclass(record):
        return {field.name for field in dataclasses.fields(record)}
    return {field.name for field in attrs.fields(type(record))}


def shifted(window: Any, start: int) -> Any:
    """A window of the items from ``start`` on, told as one of all items."""
    stats = replace(
        window.stats,
        global_start=window.stats.global_start + start,
        global_stop=window.stats.global_stop + start,
    )
    return replace(window, indices=tuple(index + start for index in window.indices), stats=stats)


def materialized(inputs: Any) -> Any:
    """Nested iterables as nested lists, so that they can be walked more than once; all else as it is."""
    if isinstance(inputs, (Mapping, str, bytes, torch.Tensor)) or not isinstance(inputs, Iterable):
        return inputs
    return [materialized(child) for child in inputs]


def tensors_of(output: Any) -> Tensors:
    """The tensors of a ForwardOutput in a fixed order."""
    best = output.top_k
    pair = (None, None) if best is None else (best.logprobs, best.tokens)
    return (output.target_logprobs, *pair, output.logits, output.hidden_states)


class Records:
    """The classes by which a host hands outputs to its caller, and placeholders for outputs that are still to come.

    A placeholder is an output whose hidden states are one number. A host may copy its tensors and set other fields.
    """

    def __init__(self, host: type) -> None:
        namespace: Mapping[str, Any] = vars(sys.modules[host.__module__])
        if "ForwardOutput" not in namespace:
            from . import requests

            namespace = vars(requests)
        self._forward_output, self._top_k = namespace["ForwardOutput"], namespace["TopK"]
        self.memory_error: type[Exception] = namespace["TrainerRankMemoryError"]
        self._numbers = count()

    def peer_error(self, failure: PeerFailedError) -> Exception:
        """What a rank raises of another one's failure: of the trainer's own memory error the same, word by word."""
        kind, _, words = failure.cause.partition(": ")
        return self.memory_error(words) if kind == self.memory_error.__name__ else failure

    def placeholder(self) -> tuple[int, Any]:
        """A number, and the ForwardOutput that stands for it."""
        number = next(self._numbers)
        return number, self.output((None, None, None, None, torch.tensor([number])))

    def number_of(self, output: Any) -> int:
        """What a placeholder stands for."""
        return int(output.hidden_states)

    def output(self, tensors: Tensors) -> Any:
        """The ForwardOutput of these tensors."""
        logprobs, best, tokens, logits, hidden = tensors
        top_k = None if best is None else self._top_k(logprobs=best, tokens=tokens)
        return self._forward_output(target_logprobs=logprobs, top_k=top_k, logits=logits, hidden_states=hidden)

    def filled(self, nested: Any, made: Mapping[int, Any]) -> Any:
        """A nested result with the outputs in the place of its placeholders.

        Fields that the host has set on a placeholder, beyond the tensors, are kept.
        """
        if isinstance(nested, (list, tuple)):
            return [self.filled(child, made) for child in nested]
        if nested.hidden_states is None:  # nothing was asked for
            return nested
        found = made[self.number_of(nested)]
        return replace(
            nested,
            target_logprobs=found.target_logprobs,
            top_k=found.top_k,
            logits=found.logits,
            hidden_states=found.hidden_states,
        )
