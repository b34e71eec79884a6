"""Gradients over the stages of a pipeline.

A LoRA parameter lives on one stage, a custom head on all, and a tied weight on the first and the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from .agreement import gather
from .base_model import is_copy, is_tied
from .compat import HEAD_PARAMETER, Square


def is_head(parameter: torch.nn.Parameter) -> bool:
    """Whether the parameter belongs to a custom head, of which every stage has a replica."""
    return bool(getattr(parameter, HEAD_PARAMETER, False))


def made_equal(parameters: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The same gradients, but on every stage one stage's for what several stages hold; collective over the pipeline.

    All stages have found the same up to rounding, which may differ with the device, or with the order in which a
    reduction over data-parallel ranks adds. Taking one stage's word keeps replicas and copies equal to the last bit.

    Args:
        parameters: of this rank.
        gradients: of each, reduced over the data-parallel ranks; changed in place.
    """
    pairs = list(zip(parameters, gradients, strict=True))
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    for gradient in (gradient for parameter, gradient in pairs if is_head(parameter)):
        dist.broadcast(gradient, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    first = parallel_state.get_pipeline_model_parallel_first_rank()
    tied = [gradient for parameter, gradient in pairs if is_tied(parameter)]
    for gradient in tied[:1]:
        dist.broadcast(gradient, src=first, group=parallel_state.get_embedding_group())
    for gradient in tied[1:]:  # of another chunk of this rank
        gradient.copy_(tied[0])
    return gradients


def counts_here(parameter: torch.nn.Parameter) -> bool:
    """Whether this stage is the one that counts the parameter in the gradient norm."""
    if is_head(parameter):
        return bool(parallel_state.is_pipeline_last_stage())
    return not is_copy(parameter)


def added_up(told: Iterable[Iterable[tuple[int, float]]], dtype: torch.dtype) -> torch.Tensor:
    """The squares that all stages tell, added one by one in the order of their places."""
    total = torch.zeros((), dtype=dtype)
    for _, square in sorted(chain.from_iterable(told), key=itemgetter(0)):
        total.add_(square)
    return total


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
    total = added_up([some for some, _ in told], next((dtype for some, dtype in told if some), torch.float32))
    if not parallel_state.is_pipeline_last_stage():
        total.zero_()  # all stages have found the same: one brings it in
    total = total.to(values.device)
    dist.all_reduce(total)
    return float(total.sqrt())
