"""The optimizer step over the slots that have gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from . import lora
from .agreement import largest
from .compat import HEAD_PARAMETER
from .lora import SlotRef
from .optimizer import SlotOptimizer
from .requests import AdamParams, TrainerRankSlotStateError
from .runtime import tensor_group
from .slots import Slots


class Stepping(Slots):
    """The part of a trainer that reduces gradients and steps; every method with a collective runs on all ranks."""

    def dp_reduce(self, tensor: torch.Tensor, *, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce in place over the data-parallel ranks."""
        dist.all_reduce(tensor, op=op, group=parallel_state.get_data_parallel_group(with_context_parallel=True))

    def zero_grad(self) -> None:
        """Drop the gradients of all slots, heads included."""
        for params in self._checkpoint_slot_params_by_name.values():
            for parameter in params:
                parameter.grad = None

    def optim_step(
        self, *, params: AdamParams, scale_grads: float = 1.0, checkpoints: Sequence[str | None] | None = None
    ) -> dict[str, float]:
        """Step the slots that have gradients on any rank; collective over all ranks.

        Gradients are summed over the data-parallel ranks and multiplied by ``scale_grads``; their common norm is
        clipped. A norm that is not finite changes nothing and drops all gradients.

        Returns:
            learning_rate, grad_norm (before clipping), update_successful (0 or 1), num_zeros_in_grad (always 0).

        Raises:
            ValueError: an unknown slot.
            TrainerRankSlotStateError: no gradients to step with, or outputs that still wait for their backward.
        """
        selected = self._selected_dynamic_checkpoints(checkpoints)
        return self._dynamic_optim_step(selected, params=params, scale_grads=scale_grads)

    def _selected_dynamic_checkpoints(self, checkpoints: Sequence[str | None] | None) -> tuple[str | None, ...]:
        loaded = self._checkpoint_slot_params_by_name
        names = sorted(loaded, key=_base_first) if checkpoints is None else list(dict.fromkeys(checkpoints))
        if unknown := sorted(set(names) - set(loaded), key=_base_first):
            raise ValueError(f"Unknown checkpoint slots: {unknown}")
        flags = self._checkpoint_grad_flags(names) if names else ()
        ready = tuple(name for name, has_grad in zip(names, flags, strict=True) if has_grad)
        if not ready or (checkpoints is not None and len(ready) < len(names)):
            missing = sorted(set(names) - set(ready), key=_base_first)
            raise TrainerRankSlotStateError(f"no gradients on any rank for slots {missing}; call loss.backward() first")
        return ready

    def _checkpoint_grad_flags(self, names: Sequence[str | None]) -> tuple[bool, ...]:
        """For each slot, whether some parameter has a gradient on some rank."""
        slots = [self._checkpoint_slot_params_by_name[name] for name in names]
        return self._anywhere([any(parameter.grad is not None for parameter in params) for params in slots])

    def _anywhere(self, flags: Sequence[bool]) -> tuple[bool, ...]:
        return tuple(bool(flag) for flag in largest(flags, device=self.device))

    def _dynamic_optim_step(
        self, checkpoint_names: Sequence[str | None], *, params: AdamParams, scale_grads: float
    ) -> dict[str, float]:
        for name in checkpoint_names:
            self._guard_checkpoint_can_step(name)
        slots = {name: self._checkpoint_slot_params_by_name[name] for name in checkpoint_names}
        grads = {name: self._reduce_dynamic_grads(slot, scale_grads=scale_grads) for name, slot in slots.items()}
        every_param = [parameter for slot in slots.values() for parameter in slot]
        norm = _distributed_grad_norm(every_param, [grad for some in grads.values() for grad in some])
        if math.isfinite(norm):
            clip = min(1.0, params.grad_clip_norm / (norm + 1e-6)) if params.grad_clip_norm > 0 else 1.0
            for name, slot in slots.items():
                self._step_slot(name, slot, [grad * clip for grad in grads[name]], params)
        else:
            self.zero_grad()
        return {
            "learning_rate": float(params.learning_rate),
            "grad_norm": norm,
            "update_successful": float(math.isfinite(norm)),
            "num_zeros_in_grad": 0.0,
        }

    def _step_slot(
        self, name: str | None, slot: Sequence[torch.nn.Parameter], grads: Sequence[torch.Tensor], params: AdamParams
    ) -> None:
        optimizer = self._dynamic_optimizers.setdefault(name, SlotOptimizer([], params))
        optimizer.join(slot, params)
        used = self._used(slot)
        optimizer.step([grad if use else None for grad, use in zip(grads, used, strict=True)])
        for parameter in slot:
            parameter.grad = None

    def _used(self, slot: Sequence[torch.nn.Parameter]) -> list[bool]:
        """LoRA always steps; a parameter of a custom head only if some rank has a gradient for it."""
        heads = [getattr(parameter, HEAD_PARAMETER, False) for parameter in slot]
        if not any(heads):
            return [True] * len(slot)
        anywhere = self._anywhere([p.grad is not None for p, head in zip(slot, heads, strict=True) if head])
        found = iter(anywhere)
        return [next(found) if head else True for head in heads]

    def _reduce_dynamic_grads(
        self, params: Sequence[torch.nn.Parameter], *, scale_grads: float
    ) -> tuple[torch.Tensor, ...]:
        """Float32 gradients, scaled, and summed over the data-parallel ranks; zeros where there is none."""
        grads = [
            torch.zeros_like(parameter, dtype=torch.float32)
            if parameter.grad is None
            else parameter.grad.float() * scale_grads
            for parameter in params
        ]
        for parameter, grad in zip(params, grads, strict=True):
            if getattr(parameter, "sequence_parallel", False):  # a base weight that saw a share of the tokens only
                dist.all_reduce(grad, group=tensor_group())
        if grads and parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1:
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            self.dp_reduce(flat)
            pieces = torch.split(flat, [grad.numel() for grad in grads])
            grads = [piece.view_as(grad) for piece, grad in zip(pieces, grads, strict=True)]
        return tuple(grads)

    def _guard_checkpoint_can_step(self, name: str | None) -> None:
        graphs = self._live_graphs  # all of which, of whatever slot, need the base weights as they were
        if graphs.waiting_anywhere() if name is None else graphs.waiting(SlotRef("checkpoint", name)):
            raise TrainerRankSlotStateError(
                f"cannot step checkpoint slot {name!r} while its outputs wait for their backward: "
                "call loss.backward() without retain_graph first, or release the outputs"
            )


def _base_first(name: str | None) -> tuple[bool, str]:
    return name is not None, str(name)


def _distributed_grad_norm(params: Sequence[torch.nn.Parameter], grads: Sequence[torch.Tensor]) -> float:
    """The norm over all ranks, each parameter counted once."""
    squared = torch.zeros((), dtype=torch.float64)
    for parameter, grad in zip(params, grads, strict=True):
        if _include_in_distributed_grad_norm(parameter):
            squared = squared.to(grad.device).add_(grad.double().square().sum())
    dist.all_reduce(squared)
    return float(squared.sqrt())


def _include_in_distributed_grad_norm(parameter: torch.nn.Parameter) -> bool:
    """Whether this rank counts it: the first of those that hold a replica."""
    sharded = any(getattr(parameter, mark, False) for mark in (lora.SHARDED, "tensor_model_parallel"))
    first_of_tensor = sharded or parallel_state.get_tensor_model_parallel_rank() == 0
    return first_of_tensor and int(parallel_state.get_data_parallel_rank(with_context_parallel=True)) == 0
