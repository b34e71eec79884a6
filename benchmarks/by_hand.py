"""1F1B as a loop written by hand for one model: no engine, nothing checked, shapes and dtype known, gloo's own calls.

What this loop takes above the bound is the machine's, gloo's and autograd's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def step_by_hand(
    stage: nn.Module, *, rank: int, num_ranks: int, inputs: list[Tensor], loss: Callable[[Tensor], Tensor]
) -> Callable[[], None]:
    """Return a function that runs one step over all ``inputs``; every rank calls it.

    Args:
        stage: this rank's, of a chain with one stage a rank; its output has the shape and the dtype of its input.
        rank, num_ranks: of the default process group.
        inputs: one for each microbatch, of one shape, on every rank.
        loss: of the last stage's output.
    """
    ahead = min(num_ranks - 1 - rank, len(inputs))

    def receives(source: int) -> deque[tuple[Tensor, dist.Work]]:
        """Posted for all microbatches at once; from a rank that there is not, nothing."""
        if not 0 <= source < num_ranks:
            return deque()
        buffers = [torch.empty_like(each) for each in inputs]
        return deque((buffer, _started(dist.irecv(buffer, source))) for buffer in buffers)

    def step() -> None:
        activations, gradients = receives(rank - 1), receives(rank + 1)
        graphs: deque[tuple[Tensor, Tensor]] = deque()
        fresh, sends = deque(inputs), list[dist.Work]()

        def forward() -> None:
            if rank == 0:
                hidden = fresh.popleft()
            else:
                hidden, work = activations.popleft()
                work.wait()
                hidden.requires_grad_()
            output = stage(hidden)
            if rank < num_ranks - 1:
                sends.append(_started(dist.isend(output.detach(), rank + 1)))
            graphs.append((hidden, output))

        def backward() -> None:
            hidden, output = graphs.popleft()
            if rank == num_ranks - 1:
                loss(output).backward()
            else:
                gradient, work = gradients.popleft()
                work.wait()
                output.backward(gradient)
            if rank > 0:
                assert hidden.grad is not None
                sends.append(_started(dist.isend(hidden.grad, rank - 1)))

        for _ in range(ahead):
            forward()
        for _ in range(len(inputs) - ahead):
            forward()
            backward()
        for _ in range(ahead):
            backward()
        for work in sends:
            work.wait()

    return step


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None  # this rank is in the group
    return work
