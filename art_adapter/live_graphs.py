"""Which slots still have outputs that wait for their backward.

Each group of outputs saves one empty marker for backward. Autograd drops it when a backward without
``retain_graph`` has passed, or when the caller lets go of the outputs; a weak reference tells when that happened.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .lora import SlotRef
from .requests import ForwardOutput, TopK


class LiveGraphs:
    """The markers of all slots."""

    def __init__(self) -> None:
        self._markers: dict[SlotRef, list[weakref.ref[torch.Tensor]]] = {}

    def track(self, ref: SlotRef | None, outputs: list[ForwardOutput]) -> list[ForwardOutput]:
        """The same outputs as fresh tensors, which the caller may change in place, each holding the marker."""
        if ref is None:
            return outputs
        marker = torch.empty(0)
        self._markers[ref] = [*self._alive(ref), weakref.ref(marker)]
        return [_mark(output, marker) for output in outputs]

    def waiting(self, ref: SlotRef) -> bool:
        """Whether some output of the slot can still be differentiated."""
        return bool(self._alive(ref))

    def waiting_anywhere(self) -> bool:
        """Whether some output of any slot, or of the base model, can still be differentiated."""
        return any(map(self._alive, self._markers))

    def _alive(self, ref: SlotRef) -> list[weakref.ref[torch.Tensor]]:
        return [marker for marker in self._markers.get(ref, []) if marker() is not None]


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, marker: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(marker)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _mark(output: ForwardOutput, marker: torch.Tensor) -> ForwardOutput:
    def hold(value: torch.Tensor | None) -> torch.Tensor | None:
        if value is None or not value.requires_grad:
            return value
        held: torch.Tensor = _Hold.apply(value, marker)  # type: ignore[no-untyped-call]
        return held

    best = output.top_k
    return ForwardOutput(
        target_logprobs=hold(output.target_logprobs),
        top_k=None if best is None else TopK(hold(best.logprobs), best.tokens),  # type: ignore[arg-type]
        logits=hold(output.logits),
        hidden_states=hold(output.hidden_states),
    )
