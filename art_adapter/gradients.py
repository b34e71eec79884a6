"""Gradients over the stages of a pipeline: a LoRA parameter lives on one stage, a custom head on all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from .agreement import gather, largest
from .compat import HEAD_PARAMETER, Square


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


def norm_over_stages(squares: Sequence[Square], *, places: Mapping[int, tuple[int, float]]) -> float:
    """The gradient norm that one stage would find, to the last bit; collective over the world.

    There the squares are added one by one, slot by slot in the order of the layers. Here each stage tells its squares,
    and they are added in that order.

    Args:
        squares: of this rank's parameters.
        places: by the id of a parameter, its place in that order.
    """
    counted = [(places[id(parameter)], square) for parameter, square in squares if counts_here(parameter)]
    values = torch.stack([square for _, square in counted]) if counted else torch.zeros(0)
    own = [(place, value) for (place, _), value in zip(counted, values.tolist(), strict=True)]
    told = gather((own, values.dtype), group=parallel_state.get_pipeline_model_parallel_group())
    total = torch.zeros((), dtype=next((dtype for some, dtype in told if some), torch.float32))
    for _, square in sorted(chain.from_iterable(some for some, _ in told), key=itemgetter(0)):
        total.add_(square)
    if not parallel_state.is_pipeline_last_stage():
        total.zero_()  # all stages have found the same: one brings it in
    total = total.to(values.device)
    dist.all_reduce(total)
    return float(total.sqrt())
