"""Gradients over the stages of a pipeline: a LoRA parameter lives on one stage, a custom head on all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from .agreement import largest
from .compat import HEAD_PARAMETER


def is_head(parameter: torch.nn.Parameter) -> bool:
    """Whether the parameter belongs to a custom head, of which every stage has a replica."""
    return bool(getattr(parameter, HEAD_PARAMETER, False))


def take_from_last_stage(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Give every stage the last stage's gradients of the custom heads, in place; collective over the pipeline.

    The callers of all stages compute the same loss; taking one stage's word for it keeps the replicas equal to the
    last bit even if a device or a library rounds differently on another.
    """
    heads = [parameter for parameter in parameters if is_head(parameter)]
    if not heads:
        return
    group = parallel_state.get_pipeline_model_parallel_group()
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    used = largest([parameter.grad is not None for parameter in heads], device=heads[0].device, group=group)
    for parameter in (parameter for parameter, use in zip(heads, used, strict=True) if use):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.broadcast(parameter.grad, src=source, group=group)


def counts_here(parameter: torch.nn.Parameter) -> bool:
    """Whether this stage is the one that counts the parameter in the gradient norm."""
    return not is_head(parameter) or parallel_state.is_pipeline_last_stage()
