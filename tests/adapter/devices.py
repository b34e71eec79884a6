"""A device that is made up: only decoders take memory on it, for each token from its forward to its backward."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from art_adapter.canary import _Marked


class Device:
    """In the place of ``art_adapter.memory_watch.DeviceMemory``."""

    is_measured = True

    def __init__(self, *, bytes_per_token: int) -> None:
        self._bytes_per_token = bytes_per_token
        self._kept: list[weakref.ref[torch.Tensor]] = []

    def note(self, decoder: Any, inputs: Any, hidden: torch.Tensor) -> torch.Tensor:
        """A forward hook of a decoder: its output saves an empty row, which autograd frees with the rest."""
        if not hidden.requires_grad:
            return hidden
        row = torch.empty(hidden.shape[0])
        self._kept.append(weakref.ref(row))
        marked: torch.Tensor = _Marked.apply(hidden, row)
        return marked

    def allocated(self) -> int:
        return self._bytes_per_token * sum(row.numel() for each in self._kept if (row := each()) is not None)

    peak = allocated
