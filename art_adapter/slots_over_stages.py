"""A trainer's slots over stages: they are loaded, stepped and zeroed by all ranks, and counted once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state

from .agreement import together
from .compat import norm_by, places_in_model, world_is
from .gradients import made_equal, norm_over_stages
from .stages import StageExecutor


class PipelinedSlots:
    """What a pipelined trainer overrides of its slots; it stands in front of the trainer's own class.

    Attributes:
        stages: those of this rank, or None if the model is not cut.
    """

    stages: StageExecutor | None = None
    _changes = 0  # of what forwards depend on

    def optim_step(self, **options: Any) -> dict[str, float]:
        """As the trainer's own, once every backward that was called is complete; collective over all ranks."""
        step: Callable[..., dict[str, float]] = super().optim_step  # type: ignore[misc]
        if self.stages is not None:
            self.stages.pipeline.flush()
            self._changes += 1
        return step(**options)

    def zero_grad(self) -> None:
        """As the trainer's own, after the backwards that the caller's backward calls stand for have all run."""
        if self.stages is not None:
            self.stages.pipeline.invalidate()
        super().zero_grad()  # type: ignore[misc]

    # What follows is called by the trainer's own class.

    def _dynamic_optim_step(self, checkpoint_names: Sequence[str], **options: Any) -> dict[str, float]:
        step: Callable[..., dict[str, float]] = super()._dynamic_optim_step  # type: ignore[misc]
        if self.stages is None:
            return step(checkpoint_names, **options)
        places = places_in_model(self, checkpoint_names)
        with norm_by(partial(norm_over_stages, places=places), step):
            return step(checkpoint_names, **options)

    def _reduce_dynamic_grads(self, params: Sequence[torch.nn.Parameter], **options: Any) -> Any:
        reduced = super()._reduce_dynamic_grads(params, **options)  # type: ignore[misc]
        return reduced if self.stages is None else made_equal(params, reduced)

    def _guard_checkpoint_can_step(self, name: str) -> None:
        guard = super()._guard_checkpoint_can_step  # type: ignore[misc]
        if self.stages is None:
            guard(name)
        else:
            together("optim_step", lambda: guard(name))

    def _load_slot(self, *arguments: Any, **options: Any) -> int:
        load = super()._load_slot  # type: ignore[misc]
        if self.stages is None:
            return int(load(*arguments, **options))
        self.stages.pipeline.invalidate()  # what was given is finished under the weights that it began with
        self._changes += 1
        return int(together("loading a slot", lambda: load(*arguments, **options)))

    def _validate_dynamic_slot_consistency(self, *arguments: Any, **options: Any) -> Any:
        """Stages of unequal size hold different parts of a slot; the ranks of one stage must hold the same."""
        validate = super()._validate_dynamic_slot_consistency  # type: ignore[misc]
        if self.stages is None:
            return validate(*arguments, **options)
        stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        with world_is(stage, validate):
            return together("loading a slot", lambda: validate(*arguments, **options))
