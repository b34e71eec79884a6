"""The same stages under the schedules of torch.distributed.pipelining, where the loss is a closure of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def torch_step(
    stage: nn.Module, *, rank: int, ranks: int, schedule: str, inputs: list[Tensor], loss: Callable[[Tensor], Tensor]
) -> Callable[[], None]:
    """Return a function that runs one step over all ``inputs``; every rank calls it.

    torch cuts microbatches out of one batch along the first axis, so all of ``inputs`` have one shape. Its first call
    exchanges shapes. What would only cost torch time is off: scaling of gradients and merging of outputs.

    Raises:
        KeyError: torch has no such schedule here.
    """
    runner = SCHEDULES[schedule](
        PipelineStage(stage, rank, ranks, torch.device("cpu")),
        n_microbatches=len(inputs),
        loss_fn=lambda outputs, _: loss(outputs),
        scale_grads=False,
    )
    batch = torch.cat(inputs)
    first = (batch,) if rank == 0 else ()
    last: dict[str, Any] = {"target": torch.zeros(len(batch)), "losses": []} if rank == ranks - 1 else {}

    def step() -> None:
        runner.step(*first, **last, return_outputs=False)

    return step
