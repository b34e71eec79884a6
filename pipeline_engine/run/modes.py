"""Modes: what the caller's thread was set to when it called, so that every action runs under the same."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from attrs import frozen

R = TypeVar("R")

_AUTOCAST_DEVICES = ("cpu", "cuda")


@frozen(eq=False)
class Modes:
    """Grad, inference and autocast mode, default dtype and the ContextVars of one call."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    default_dtype: torch.dtype
    context: contextvars.Context

    @classmethod
    def of_caller(cls) -> Modes:
        """What the calling thread is set to now."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=_autocast_now(),
            default_dtype=torch.get_default_dtype(),
            context=contextvars.copy_context(),
        )

    def renewed(self) -> Modes:
        """What the calling thread is set to now, but for whether autograd records, which holds for a whole call."""
        return Modes(self.grad, self.inference, _autocast_now(), torch.get_default_dtype(), contextvars.copy_context())

    @property
    def differentiates(self) -> bool:
        """Whether autograd records under these modes."""
        return self.grad and not self.inference

    def run(self, function: Callable[[], R]) -> R:
        """Call ``function`` in this thread under these modes."""
        return self.context.run(self._run, function)

    def _run(self, function: Callable[[], R]) -> R:
        if self._all_but_grad_are_set():
            if torch.is_grad_enabled() == self.grad:
                return function()
            with torch.set_grad_enabled(self.grad):
                return function()
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled() != self.inference:
                stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, enabled, dtype in self.autocast:
                if (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) != (enabled, dtype):
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            stack.enter_context(_default_dtype(self.default_dtype))
            return function()

    def _all_but_grad_are_set(self) -> bool:
        """Whether the thread is set to these modes as it is; in a steady loop it always is."""
        return (
            torch.is_inference_mode_enabled() == self.inference
            and torch.get_default_dtype() == self.default_dtype
            and self.autocast == _autocast_now()
        )


def _autocast_now() -> tuple[tuple[str, bool, torch.dtype], ...]:
    return tuple(
        [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _AUTOCAST_DEVICES]
    )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if before == dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
