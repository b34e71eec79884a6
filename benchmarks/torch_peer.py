"""The same stages under the schedules of torch.distributed.pipelining, where the loss is a closure of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

import pipeline_engine as pe
from benchmarks.transformer import next_token_loss

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved zero-bubble": ScheduleInterleavedZeroBubble,
    "looped-bfs": ScheduleLoopedBFS,
    "zb-v": ScheduleZBVZeroBubble,
}


def torch_step(
    stages: Mapping[int, nn.Module],
    *,
    num_stages: int,
    schedule: str,
    inputs: list[Tensor],
    targets: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[], None]:
    """Return a function that runs one step over all ``inputs``; every rank calls it.

    torch cuts microbatches out of one batch along the first axis, so all of ``inputs`` have one shape. Its first call
    exchanges shapes. What would only cost torch time is off: scaling of gradients and merging of outputs.

    Args:
        stages: this rank's, by number.
        num_stages: of all ranks.
        schedule: one of ``SCHEDULES``.
        inputs: one for each microbatch.
        targets: one row for each row of the batch.
        loss: of the last stage's output for a microbatch, and its targets.

    Raises:
        KeyError: torch has no such schedule here.
    """
    wrapped = [PipelineStage(stage, number, num_stages, torch.device("cpu")) for number, stage in stages.items()]
    runner = SCHEDULES[schedule](
        wrapped[0] if len(wrapped) == 1 else wrapped,
        n_microbatches=len(inputs),
        loss_fn=loss,
        scale_grads=False,
    )
    batch = torch.cat(inputs)
    first = (batch,) if 0 in stages else ()
    last: dict[str, Any] = {"target": targets, "losses": []} if num_stages - 1 in stages else {}

    def step() -> None:
        runner.step(*first, **last, return_outputs=False)

    return step


def torch_text_step(
    stages: Mapping[int, nn.Module], graph: pe.StageGraph, schedule: str, rows: list[Tensor]
) -> Callable[[], None]:
    """``torch_step`` of a language model over rows of tokens, one row or more for each microbatch."""
    return torch_step(
        stages,
        num_stages=graph.num_stages,
        schedule=schedule,
        inputs=rows,
        targets=torch.cat(rows),
        loss=next_token_loss,
    )
