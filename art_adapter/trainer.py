"""TrainerRank with pipeline parallelism: a trainer's own class, whose forward runs in stages.

Only the seam of the trainer is overridden.  While a forward is planned, ``_forward_packed`` does not run: it defers
the group and returns placeholders.  Then all deferred groups go through the pipeline, and the placeholders in the
planned result are replaced by the outputs as they come.

Note [re-planned after a change]: groups of later windows run ahead of the caller.  When he changes what they depend on
inside his loop (an optimizer step, another slot), what has run ahead is dropped and the rest is planned again, so that
the result is that of a trainer that runs one window after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state

from .agreement import gather
from .compat import slot_parameters
from .gradients import counts_here, take_from_last_stage
from .records import Records, replace, shifted, tensors_of
from .reference import ReferenceTrainerRank
from .requests import ForwardInputs, ForwardOutputs, materialize
from .runtime import language_model
from .stages import Group, Outputs, StageExecutor
from .topology import Topology, check_supported

T = TypeVar("T")


class PipelinedForward:
    """What a pipelined trainer overrides; it stands in front of the trainer's own class.

    Args:
        runtime: this rank's stage of the model.
        schedule: a name of ``pipeline_engine.SCHEDULES``.
        deadline: seconds that any single wait for another stage may take.
        options: of the trainer's own class.

    Raises:
        UnsupportedTopologyError: this combination of parallel sizes cannot run.
    """

    def __init__(self, runtime: Any, *, schedule: str = "1f1b", deadline: float = 600.0, **options: Any) -> None:
        check_supported(Topology.of(runtime), runtime)
        self._deferred: list[Group] | None = None
        self._weights_changed = False
        super().__init__(runtime, **options)  # type: ignore[call-arg]
        self._records = Records.of(type(self).__mro__[2])
        self.stages = StageExecutor(
            language_model(runtime.model[0]),
            parallel_state.get_pipeline_model_parallel_group(),
            hidden=self._hidden_of,
            outputs=self._outputs_of,
            schedule=schedule,
            deadline=deadline,
        )

    def forward_micro_batches(self, inputs: Iterable[ForwardInputs]) -> Iterator[Any]:
        """As the trainer's own; windows run ahead of the caller, see Note [re-planned after a change]."""
        items = [materialize(item) for item in inputs]
        start = 0
        while True:
            for window in self._windows(items[start:]):
                selected = self._selection()
                self._weights_changed = False
                yield shifted(window, start)
                if self._weights_changed or self._selection() != selected:
                    start += window.stats.global_stop
                    break
            else:
                return

    def dp_rank_forward(self, inputs: ForwardInputs) -> ForwardOutputs:
        """As the trainer's own."""
        nested, groups = self._planned(lambda: super(PipelinedForward, self).dp_rank_forward(inputs))  # type: ignore[misc]
        filled: ForwardOutputs = self._filled(nested, groups, self.stages.forward(groups))
        return filled

    def optim_step(self, **options: Any) -> dict[str, float]:
        """As the trainer's own, once every gradient that was given has come through all stages."""
        self.stages.pipeline.flush()
        self._weights_changed = True
        result: dict[str, float] = super().optim_step(**options)  # type: ignore[misc]
        return result

    def load_checkpoint_slot(self, *arguments: Any, **options: Any) -> int:
        """As the trainer's own."""
        self._weights_changed = True
        loaded: int = super().load_checkpoint_slot(*arguments, **options)  # type: ignore[misc]
        return loaded

    def load_lora_slot(self, *arguments: Any, **options: Any) -> int:
        """As the trainer's own."""
        self._weights_changed = True
        loaded: int = super().load_lora_slot(*arguments, **options)  # type: ignore[misc]
        return loaded

    def close(self) -> None:
        """Leave the pipeline; the trainer cannot run forwards any more."""
        self.stages.pipeline.close()

    def _windows(self, items: Sequence[Any]) -> Iterator[Any]:
        """Plan every window, then hand out each with its outputs as they come through the pipeline."""
        planning = super().forward_micro_batches(items)  # type: ignore[misc]
        planned: list[tuple[Any, list[Group]]] = []
        while (found := self._planned(lambda: next(planning, None)))[0] is not None:
            planned.append(found)
        outputs = self.stages.stream([group for _, groups in planned for group in groups])
        for window, groups in planned:
            filled = self._filled(window.outputs, groups, [next(outputs) for _ in groups])
            yield replace(window, outputs=filled)
        for _ in outputs:
            raise AssertionError("the pipeline has more outputs than were planned")

    def _planned(self, plan: Callable[[], T]) -> tuple[T, list[Group]]:
        """Run a forward of the trainer's own class up to its seam; its result holds placeholders."""
        groups: list[Group] = []
        self._deferred = groups
        try:
            return plan(), groups
        finally:
            self._deferred = None

    def _forward_packed(self, items: Sequence[Any], prepared: Any) -> list[Any]:
        if self._deferred is None:
            raise RuntimeError("a pipelined trainer runs forwards through forward_micro_batches and dp_rank_forward")
        placeholders = [self._records.placeholder() for _ in items]
        self._deferred.append(Group(items, prepared, int(prepared.tokens.numel()), placeholders))
        return placeholders

    def _track_slot_graph_outputs(self, slot: Any, outputs: Sequence[Any]) -> list[Any]:
        if self._deferred is None:
            tracked: list[Any] = super()._track_slot_graph_outputs(slot, outputs)  # type: ignore[misc]
            return tracked
        self._deferred[-1].slot = slot
        return list(outputs)

    def _filled(self, nested: Any, groups: Sequence[Group], found: Sequence[Outputs]) -> Any:
        """The planned result with outputs in the place of its placeholders, in the same nesting."""
        by_placeholder: dict[int, Any] = {}
        for group, outputs in zip(groups, found, strict=True):
            made = self._track_slot_graph_outputs(group.slot, [self._records.output(each) for each in outputs])
            identities = [id(placeholder.hidden_states) for placeholder in group.placeholders]
            by_placeholder |= dict(zip(identities, made, strict=True))

        def fill(node: Any) -> Any:
            if isinstance(node, (list, tuple)):
                return [fill(child) for child in node]
            return by_placeholder.get(id(node.hidden_states), node)

        return fill(nested)

    def _hidden_of(self, group: Group) -> torch.Tensor:
        hidden: torch.Tensor = super()._decoder_hidden(group.prepared)  # type: ignore[misc]
        return hidden

    def _outputs_of(self, group: Group) -> Outputs:
        outputs = super()._forward_packed(group.items, group.prepared)  # type: ignore[misc]
        return [tensors_of(output) for output in outputs]

    def _selection(self) -> tuple[Any, ...]:
        """What decides which slot a request without a slot of its own uses."""
        return (self._default_slot_ref, *self._slot_stack)  # type: ignore[attr-defined]

    def _reduce_dynamic_grads(self, params: Sequence[torch.nn.Parameter], *, scale_grads: float) -> Any:
        take_from_last_stage(params)
        return super()._reduce_dynamic_grads(params, scale_grads=scale_grads)  # type: ignore[misc]

    def _include_in_distributed_grad_norm(self, parameter: torch.nn.Parameter) -> bool:
        included: bool = super()._include_in_distributed_grad_norm(parameter)  # type: ignore[misc]
        return included and counts_here(parameter)

    def _validate_dynamic_slot_consistency(
        self, kind: Any, name: str, loaded_sites: int
    ) -> tuple[torch.nn.Parameter, ...]:
        """The slot's parameters on this rank, once all ranks of each stage agree on them; stages may differ."""
        params = slot_parameters(self, kind, name)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        shapes = [(tuple(parameter.shape), str(parameter.dtype)) for parameter in params]
        by_stage: dict[int, Any] = {}
        for rank, (other, *state) in enumerate(gather((stage, loaded_sites, shapes))):
            if by_stage.setdefault(other, state) != state:
                raise RuntimeError(
                    f"{kind} slot {name!r} is not the same on all ranks of stage {other}: rank {rank} loaded "
                    f"{state[0]} sites, another {by_stage[other][0]}; hand the full adapter to every rank"
                )
        return params

    @staticmethod
    def _forward_memory_group() -> Any:
        """The ranks that run one data-parallel rank's forward together: with TP=CP=1, those of the pipeline."""
        return parallel_state.get_pipeline_model_parallel_group()


@cache
def pipelined(base: type) -> type:
    """The pipelined class over a trainer's own class."""
    return type(f"Pipelined{base.__name__}", (PipelinedForward, base), {"__module__": __name__})


class TrainerRank:
    """A trainer over this rank's part of a model: the host's own class, pipelined if the model is cut into stages.

    Args:
        runtime: this rank's model chunks and their configuration.
        schedule: pipeline schedule, used with several stages only; a name of ``pipeline_engine.SCHEDULES``.
        deadline: seconds that any single wait for another stage may take; used with several stages only.
        options: of the host's class.

    Raises:
        UnsupportedTopologyError: this combination of parallel sizes cannot run.
    """

    def __new__(cls, runtime: Any, *, schedule: str = "1f1b", deadline: float = 600.0, **options: Any) -> Any:
        """Make an instance of the class that fits the topology."""
        if not Topology.of(runtime).is_pipelined:
            return ReferenceTrainerRank(runtime, **options)
        return pipelined(ReferenceTrainerRank)(runtime, schedule=schedule, deadline=deadline, **options)
