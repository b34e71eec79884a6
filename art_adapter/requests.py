"""What the caller of a TrainerRank passes in and gets back, and the order of nested requests.

The names, fields and defaults are those of ART's TrainerRank.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import attrs
import torch

T = TypeVar("T")


class TrainerRankMemoryError(RuntimeError):
    """A forward does not fit in the memory budget, or did not fit in the device's memory."""


class TrainerRankSlotStateError(RuntimeError):
    """A checkpoint slot is not in the state that the call needs."""


class _Unset(enum.Enum):
    UNSET = "unset"


Unset = _Unset.UNSET
AdapterSelection: TypeAlias = str | _Unset | None


@attrs.frozen
class AdamParams:
    """The hyper-parameters of one AdamW step.

    Attributes:
        learning_rate: of all parameters of the slot.
        beta1, beta2: decay of the first and second moment.
        weight_decay: decoupled from the gradient.
        grad_clip_norm: what the norm of all gradients, over all stages, is clipped to; 0 or less turns it off.
    """

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1
    grad_clip_norm: float = 0.1


@attrs.frozen(eq=False)
class TopK:
    """The likeliest tokens at each position.

    Attributes:
        logprobs: ``[tokens, k]`` float32, largest first.
        tokens: ``[tokens, k]`` int64.
    """

    logprobs: torch.Tensor
    tokens: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class ForwardInput:
    """One sequence and what is wanted of it.

    Attributes:
        input_tokens: ``[tokens]``, or any shape, which is read as one flat sequence.
        target_tokens: same shape, or with further dimensions behind; -100 means "no target" and yields 0.
        top_k: how many of the likeliest tokens to return per position.
        logits: whether to return ``[tokens, vocabulary]`` logits.
        hidden_states: whether to return the ``[tokens, hidden]`` input of the output layer.
        checkpoint: name of the trainable slot, None for the base model, Unset for the current selection.
        lora: the same for a frozen slot; at most one of the two may be set.
    """

    input_tokens: torch.Tensor
    target_tokens: torch.Tensor | None = None
    top_k: int | None = None
    logits: bool = False
    hidden_states: bool = False
    checkpoint: AdapterSelection = Unset
    lora: AdapterSelection = Unset

    def __attrs_post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be >= 1, not {self.top_k}")
        if self.checkpoint is not Unset and self.lora is not Unset:
            raise ValueError("ForwardInput cannot set both checkpoint and lora")

    @property
    def wants_nothing(self) -> bool:
        """Whether no output is asked for, so that the sequence need not run."""
        return self.target_tokens is None and self.top_k is None and not self.logits and not self.hidden_states


@attrs.frozen(eq=False)
class ForwardOutput:
    """What came out for one ForwardInput; what was not asked for is None.

    Attributes:
        target_logprobs: float32, in the shape ``[tokens, ...]`` of the targets.
        top_k: see TopK.
        logits: ``[tokens, vocabulary]`` in the model's dtype.
        hidden_states: ``[tokens, hidden]`` in the model's dtype.
    """

    target_logprobs: torch.Tensor | None = None
    top_k: TopK | None = None
    logits: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None


@attrs.frozen
class MicroBatchStats:
    """How a window of top-level items was cut.

    Attributes:
        global_start, global_stop: places of its items in the source, over all data-parallel ranks; stop is excluded.
        global_count, local_count: number of its items over all data-parallel ranks, and on this one.
        packed_tokens, logical_tokens: tokens computed, and tokens asked for; shared beginnings are packed once.
        estimated_required_bytes, available_bytes: what the window is expected to need, and what there was.
        rejected_candidates: larger windows that did not fit.
        cold_start: whether the estimate stands on no measurement yet.
    """

    global_start: int
    global_stop: int
    global_count: int
    local_count: int
    packed_tokens: int
    logical_tokens: int
    estimated_required_bytes: int
    available_bytes: int
    rejected_candidates: int
    cold_start: bool


@attrs.frozen(eq=False)
class MicroBatch:
    """This rank's part of one window.

    Attributes:
        inputs: its top-level items.
        outputs: their outputs, in the same nesting.
        indices: their places in the source.
        stats: how the window was cut.
    """

    inputs: Sequence[Any]
    outputs: Sequence[Any]
    indices: Sequence[int]
    stats: MicroBatchStats

    def select(self, xs: Sequence[T]) -> Sequence[T]:
        """The elements of ``xs``, one per top-level item of the source, that belong to this micro-batch."""
        return [xs[index] for index in self.indices]


ForwardInputs: TypeAlias = ForwardInput | Iterable[Any]
ForwardOutputs: TypeAlias = ForwardOutput | Sequence[Any]


def materialize(inputs: ForwardInputs) -> Any:
    """Nested iterables as nested lists, so that they can be walked more than once."""
    if isinstance(inputs, ForwardInput):
        return inputs
    return [materialize(child) for child in _children(inputs)]


def flatten(inputs: ForwardInputs) -> Iterator[ForwardInput]:
    """The requests in source order."""
    if isinstance(inputs, ForwardInput):
        yield inputs
    else:
        for child in _children(inputs):
            yield from flatten(child)


def unflatten(template: ForwardInputs, outputs: Iterator[ForwardOutput]) -> ForwardOutputs:
    """Outputs in the nesting of the requests they belong to."""
    if isinstance(template, ForwardInput):
        return next(outputs)
    return [unflatten(child, outputs) for child in _children(template)]


def _children(inputs: Iterable[Any]) -> Iterable[Any]:
    if isinstance(inputs, Mapping):
        raise TypeError("forward inputs must not be a dict: pass its values as a list, so that their order is explicit")
    if isinstance(inputs, (str, bytes, torch.Tensor)) or not isinstance(inputs, Iterable):
        raise TypeError(f"forward inputs must be ForwardInput or nested iterables of them, not {type(inputs).__name__}")
    return inputs
