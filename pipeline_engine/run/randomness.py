"""Randomness: the state of torch's default generators, so that a forward that is run again draws the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from attrs import frozen


@frozen(eq=False)
class RandomState:
    """States of the CPU's generator and, once CUDA is in use, of the current device's."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def now(cls) -> RandomState:
        """A copy of the present states."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state() if _cuda_is_in_use() else None)

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Run the body from these states on, and leave the generators as they were before."""
        outer = RandomState.now()
        self.restore()
        try:
            yield
        finally:
            outer.restore()


def _cuda_is_in_use() -> bool:
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return in_use
