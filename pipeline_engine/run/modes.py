"""Modes: what the caller's thread was set to when it called, so that every action runs under the same."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from attrs import frozen

R = TypeVar("R")

_AUTOCAST_DEVICES = ("cpu", "cuda")

Autocast = dict[str, torch.dtype]
"""By kind of device where autocast is enabled, the type that it casts to."""


@frozen(eq=False)
class Modes:
    """Grad, inference and autocast mode and the ContextVars of one call; the default dtype is one for all threads."""

    grad: bool
    inference: bool
    autocast: Autocast
    context: contextvars.Context

    @classmethod
    def of_caller(cls) -> Modes:
        """What the calling thread is set to now."""
        return cls(
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _autocast_now(), contextvars.copy_context()
        )

    def renewed(self) -> Modes:
        """What the calling thread is set to now, but for whether autograd records, which holds for a whole call."""
        return Modes(self.grad, self.inference, _autocast_now(), contextvars.copy_context())

    @property
    def differentiates(self) -> bool:
        """Whether autograd records under these modes."""
        return self.grad and not self.inference

    def run(self, function: Callable[..., R], *arguments: Any) -> R:
        """Call ``function`` under these modes, whatever this thread is set to."""
        return self.context.run(self._run_casting, function, *arguments)

    def run_recording(self, function: Callable[..., R], *arguments: Any) -> R:
        """Call ``function`` in the thread that these modes were taken from just now: only recording may differ."""
        if torch.is_inference_mode_enabled() != self.inference:
            with torch.inference_mode(self.inference):
                return self.run_recording(function, *arguments)
        if torch.is_grad_enabled() != self.grad:
            with torch.set_grad_enabled(self.grad):
                return function(*arguments)
        return function(*arguments)

    def _run_casting(self, function: Callable[..., R], *arguments: Any) -> R:
        if (now := _autocast_now()) == self.autocast:
            return self.run_recording(function, *arguments)
        with ExitStack() as stack:
            for device in _AUTOCAST_DEVICES:
                if (wanted := self.autocast.get(device)) != now.get(device):
                    stack.enter_context(torch.autocast(device, wanted, enabled=wanted is not None))
            return self.run_recording(function, *arguments)


def _autocast_now() -> Autocast:
    return {
        device: torch.get_autocast_dtype(device) for device in _AUTOCAST_DEVICES if torch.is_autocast_enabled(device)
    }
