"""The same chunks under Megatron-core's own schedules, where the loss is a function that the schedule calls.

Megatron takes a GPU for granted.  Beside what the model itself needs (``art_adapter.compat.run_megatron_on_cpu``), its
schedules need one thing more on a CPU: the count of tokens is made on the device ``"cuda"``.

Of its options for messages those are chosen here that are right over gloo and fastest: sends and receives that are not
batched, which ``interleaved`` overlaps with computing.  Two other choices silently give wrong numbers over gloo:
``overlap_p2p_comm`` with ``deallocate_pipeline_outputs``, and ``batch_p2p_comm`` with two chunks on each of two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Forward = Callable[[Any, Tensor], Tensor]
"""``forward(chunk, microbatch)``; what the chunk receives was set with its ``set_input_tensor``."""

Loss = Callable[[Tensor], Tensor]
"""Of the last chunk's output for a microbatch."""


class _CpuTorch:
    """torch as Megatron's schedules see it: what they put on ``"cuda"`` is made on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, device: Any = None, **options: Any) -> Tensor:
        return torch.zeros(*size, **options)


def configure(config: Any) -> None:
    """Choose how Megatron moves its messages.

    Args:
        config: a ``TransformerConfig``, the same for all chunks.
    """
    config.batch_p2p_comm = False
    config.overlap_p2p_comm = config.virtual_pipeline_model_parallel_size is not None
    config.deallocate_pipeline_outputs = False


def megatron_step(
    chunks: Sequence[Any], *, microbatches: Sequence[Tensor], shape: tuple[int, int], forward: Forward, loss: Loss
) -> Callable[[], list[Tensor]]:
    """Return a function that runs one step; every rank calls it, and the last one gets the losses.

    Its gradients are those of the mean of the losses.

    Args:
        chunks: this rank's; each has a ``config`` and a ``set_input_tensor``.
        microbatches: each of one size.
        shape: rows and columns ``[tokens, batch]`` of what goes from chunk to chunk; the hidden size is the config's.
        forward: runs a chunk on a microbatch.
        loss: a scalar.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func, schedules

    if not torch.cuda.is_available():
        schedules.torch = _CpuTorch()
    run = get_forward_backward_func()

    def forward_step(source: Iterator[Tensor], chunk: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
        def loss_of(output: Tensor) -> tuple[Tensor, Tensor]:
            value = loss(output)
            return value, value.detach().clone()  # the schedule divides the first by the number of microbatches

        return forward(chunk, next(source)), loss_of

    def step() -> list[Tensor]:
        losses: list[Tensor] = run(
            forward_step_func=forward_step,
            data_iterator=[iter(microbatches) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(microbatches),
            seq_length=shape[0],
            micro_batch_size=shape[1],
            forward_only=False,
        )
        return losses

    return step
