"""TrainerRank with pipeline parallelism: a trainer's own class, whose forward runs in stages.

Only the seam of the trainer is overridden.  While a forward is planned, ``_forward_packed`` does not run: it defers
the group and returns placeholders.  Then all deferred groups go through the pipeline, and the placeholders in the
planned result are replaced by the outputs as they come.

Note [re-planned after a change]: groups of later windows run ahead of the caller.  When he changes what they depend on
inside his loop (an optimizer step, another slot, another stream), what has run ahead is dropped and the rest is planned
again, so that the result is that of a trainer that runs one window after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import cache, partial
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state

from .agreement import together
from .chunks import first_is
from .compat import (
    art_trainer_rank,
    check_shape,
    norm_by,
    places_in_model,
    presented_as_one_stage,
    refusal_of,
    selection,
    world_is,
)
from .gradients import norm_over_stages, take_from_last_stage
from .publishing import PipelinedPublishing
from .records import Records, materialized, replace, shifted, tensors_of
from .reference import ReferenceTrainerRank
from .runtime import Runtime
from .stages import Group, Outputs, StageExecutor
from .topology import Topology, check_supported

T = TypeVar("T")


class PipelinedForward:
    """What a pipelined trainer overrides; it stands in front of the trainer's own class.

    Over a model that is not cut into stages it changes nothing.

    Args:
        runtime: this rank's stages of the model.
        schedule: a name of ``pipeline_engine.SCHEDULES``; by default what fits the number of stages.
        deadline: seconds that any single wait for another stage may take.
        options: of the trainer's own class.

    Attributes:
        stages: those of this rank, or None if the model is not cut.

    Raises:
        UnsupportedTopologyError: this combination of parallel sizes cannot run.
        UnsupportedHostError: the trainer's own class is not known to the adapter.
    """

    host: type
    runtime: Any
    stages: StageExecutor | None = None
    _deferred: list[Group] | None = None
    _stream: Generator[Outputs, None, None] | None = None
    _changes = 0

    def __init__(self, runtime: Any, *, schedule: str | None = None, deadline: float = 600.0, **options: Any) -> None:
        topology = Topology.of(runtime)
        if not topology.is_pipelined:
            super().__init__(runtime, **options)  # type: ignore[call-arg]
            return
        check_shape(self.host)
        check_supported(topology, refusal_of(self.host))
        with presented_as_one_stage(runtime.provider):
            super().__init__(runtime, **options)  # type: ignore[call-arg]
        self._records = Records(self.host)
        self.stages = StageExecutor(
            runtime.model,
            parallel_state.get_pipeline_model_parallel_group(),
            hidden=self._hidden_of,
            outputs=self._outputs_of,
            schedule=schedule,
            deadline=deadline,
        )

    def forward_micro_batches(self, inputs: Iterable[Any], **options: Any) -> Iterator[Any]:
        """As the trainer's own; windows run ahead of the caller, see Note [re-planned after a change]."""
        if self.stages is None:
            own: Iterator[Any] = super().forward_micro_batches(inputs, **options)  # type: ignore[misc]
            return own
        return self._windows(inputs, **options)

    def dp_rank_forward(self, inputs: Any, **options: Any) -> Any:
        """As the trainer's own."""
        run = super().dp_rank_forward  # type: ignore[misc]
        if self.stages is None:
            return run(inputs, **options)
        nested, groups = self._planned(lambda: run(inputs, **options))
        return self._filled(nested, groups, self.stages.forward(groups))

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

    def close(self) -> None:
        """Leave the pipeline; the trainer cannot run forwards any more."""
        if self.stages is not None:
            self.stages.pipeline.close()

    def _windows(self, inputs: Iterable[Any], **options: Any) -> Iterator[Any]:
        items, start = [materialized(item) for item in inputs], 0
        while True:
            with closing(self._unchanged_windows(items[start:], **options)) as windows:
                for window in windows:
                    before, stop = (self._changes, selection(self)), window.stats.global_stop
                    handed = [shifted(window, start)]
                    del window  # what waits for a backward is what the caller holds
                    yield handed.pop()
                    if before != (self._changes, selection(self)):
                        start += stop
                        break
                else:
                    return

    def _unchanged_windows(self, items: Sequence[Any], **options: Any) -> Generator[Any, None, None]:
        """Plan every window, then hand out each with its outputs as they come through the pipeline."""
        planning = super().forward_micro_batches(items, **options)  # type: ignore[misc]
        planned: list[tuple[Any, list[Group]]] = []
        while (found := self._planned(lambda: next(planning, None)))[0] is not None:
            planned.append(found)
        with closing(self._new_stream([group for _, groups in planned for group in groups])) as outputs:
            for window, groups in planned:
                yield replace(window, outputs=self._filled(window.outputs, groups, [next(outputs) for _ in groups]))
            for _ in outputs:
                raise AssertionError("the pipeline has more outputs than were planned")

    def _new_stream(self, groups: Sequence[Group]) -> Generator[Outputs, None, None]:
        """Begin a stream; one that is still running ends, and its loop plans the rest again when it goes on."""
        assert self.stages is not None
        if self._stream is not None:
            self._stream.close()
        self._changes += 1
        self._stream = stream = self.stages.stream(groups)
        return stream

    def _planned(self, plan: Callable[[], T]) -> tuple[T, list[Group]]:
        """Run a forward of the trainer's own class up to its seam; its result holds placeholders."""
        assert self.stages is not None
        groups: list[Group] = []
        self._deferred = groups
        try:
            result = plan()
        finally:
            self._deferred = None
        self.stages.check_planned_alike(groups)
        return result, groups

    def _filled(self, nested: Any, groups: Sequence[Group], found: Sequence[Outputs]) -> Any:
        """The planned result with outputs in the place of its placeholders, in the same nesting."""
        made: dict[int, Any] = {}
        for group, outputs in zip(groups, found, strict=True):
            tracked = self._track_slot_graph_outputs(group.slot, [self._records.output(each) for each in outputs])
            made |= dict(zip(group.numbers, tracked, strict=True))
        return self._records.filled(nested, made)

    # What follows is called by the trainer's own class.

    def _forward_packed(self, items: Sequence[Any], prepared: Any) -> list[Any]:
        if self.stages is None:
            own: list[Any] = super()._forward_packed(items, prepared)  # type: ignore[misc]
            return own
        if self._deferred is None:
            raise RuntimeError("a pipelined trainer runs forwards through forward_micro_batches and dp_rank_forward")
        placeholders = [self._records.placeholder() for _ in items]
        self._deferred.append(Group(items, prepared, [number for number, _ in placeholders]))
        return [output for _, output in placeholders]

    def _track_slot_graph_outputs(self, ref: Any, outputs: Sequence[Any]) -> list[Any]:
        if self._deferred is not None:  # placeholders: nothing is alive yet
            self._deferred[-1].slot = ref
            return list(outputs)
        tracked: list[Any] = super()._track_slot_graph_outputs(ref, outputs)  # type: ignore[misc]
        return tracked

    def _update_memory_profile(self, *arguments: Any, **options: Any) -> None:
        if self._deferred is None:  # else what was measured is a forward that has not run
            super()._update_memory_profile(*arguments, **options)  # type: ignore[misc]

    def _hidden_of(self, chunk: Any, group: Group) -> torch.Tensor:
        with first_is(chunk, self.runtime.model):
            hidden: torch.Tensor = super()._decoder_hidden(group.prepared)  # type: ignore[misc]
        return hidden

    def _outputs_of(self, chunk: Any, group: Group) -> Outputs:
        with first_is(chunk, self.runtime.model):
            outputs = super()._forward_packed(group.items, group.prepared)  # type: ignore[misc]
        return [tensors_of(output) for output in outputs]

    def _dynamic_optim_step(self, checkpoint_names: Sequence[str], **options: Any) -> dict[str, float]:
        step: Callable[..., dict[str, float]] = super()._dynamic_optim_step  # type: ignore[misc]
        if self.stages is None:
            return step(checkpoint_names, **options)
        places = places_in_model(self, checkpoint_names)
        with norm_by(partial(norm_over_stages, places=places), step):
            return step(checkpoint_names, **options)

    def _reduce_dynamic_grads(self, params: Sequence[torch.nn.Parameter], **options: Any) -> Any:
        if self.stages is not None:
            take_from_last_stage(params)
        return super()._reduce_dynamic_grads(params, **options)  # type: ignore[misc]

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

    def _forward_memory_group(self) -> Any:
        """The ranks that run one data-parallel rank's forward together: with TP=CP=1, those of the pipeline."""
        if self.stages is None:
            return super()._forward_memory_group()  # type: ignore[misc]
        return parallel_state.get_pipeline_model_parallel_group()


@cache
def pipelined(host: type) -> type:
    """The pipelined class over a trainer's own class."""
    publishing = (PipelinedPublishing,) if hasattr(host, "save_checkpoint_slot_lora") else ()
    bases = (*publishing, PipelinedForward, host)
    return type(f"Pipelined{host.__name__}", bases, {"__module__": __name__, "host": host})


class TrainerRank:
    """A trainer over this rank's part of a model: the host's own class, pipelined if the model is cut into stages.

    Args:
        runtime: this rank's model chunks and their configuration.
        host: the trainer's own class; by default the reference for an ``art_adapter.Runtime``, else ART's, from the
            tree that the environment variable ``ART_SRC`` points to or as it is installed.
        schedule: pipeline schedule, used with several stages only; a name of ``pipeline_engine.SCHEDULES``, by default
            what fits the number of stages.
        deadline: seconds that any single wait for another stage may take; used with several stages only.
        options: of the host's class.

    Raises:
        UnsupportedTopologyError: this combination of parallel sizes cannot run.
        UnsupportedHostError: the host's class is not known to the adapter.
        ImportError: ART cannot be found.
    """

    def __new__(
        cls,
        runtime: Any,
        *,
        host: type | None = None,
        schedule: str | None = None,
        deadline: float = 600.0,
        **options: Any,
    ) -> Any:
        """Make an instance of the class that fits the topology."""
        if host is None:
            host = ReferenceTrainerRank if isinstance(runtime, Runtime) else art_trainer_rank()
        if not Topology.of(runtime).is_pipelined:
            return host(runtime, **options)
        return pipelined(host)(runtime, schedule=schedule, deadline=deadline, **options)
